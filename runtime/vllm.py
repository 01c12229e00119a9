"""vLLM's LLM over a Runtime: its names and defaults; what it cannot do raises by name."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from ..common.errors import RequestError, UnknownSettingError, UnsupportedError, shown
from ..common.names import hint
from .keywords import LLMSettings
from .other_names import SETTINGS
from .request_options import RequestOptions
from .runtime import Runtime
from .tokenization.chat_messages import Messages
from .vllm_types import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    CompletionOutput,
    PromptType,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    each_prompt,
    listed,
    prompt_of,
)

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "RequestOutput",
    "RequestOutputKind",
    "StructuredOutputsParams",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]

OURS = {  # vLLM's name of a setting and ours; None is left to us
    **{name: name for name in ("tokenizer", "dtype", "quantization", "revision", "seed", "block_size")},
    **{name: name for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "load_format")},
    "kv_cache_dtype": "kv_cache_dtype",
    "gpu_memory_utilization": "memory_fraction",
    "enable_prefix_caching": "prefix_cache",
    "num_gpu_blocks_override": "num_kv_blocks",
    "hf_token": "token",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "distributed_executor_backend": "executor",
}
OTHER_VALUES = {  # vLLM's other names
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "distributed_executor_backend": {"uni": "uniproc", "mp": "multiproc"},
}
# Settings that have no counterpart, with the values that ask for nothing that we do not do.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "trust_remote_code": (False, True),  # a permission, of which no use is made
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "skip_tokenizer_init": (False,),
    "enable_chunked_prefill": (None, True),
    "disable_log_stats": (False, True),
    "disable_custom_all_reduce": (False, True),
    "cpu_offload_gb": (0,),
    "swap_space": (0, 4),
    "enable_lora": (False,),
    "speculative_config": (None,),
    "compilation_config": (None,),
    "hf_overrides": (None, {}),
    "logits_processors": (None, []),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "task": ("auto", "generate"),
}


class LLM:
    """A model ready to answer, as vLLM's LLM is made and asked."""

    def __init__(
        self,
        model: str,
        *,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        generation_config: str = "auto",
        hf_token: bool | str | None = None,
        **settings: Unpack[LLMSettings],
    ) -> None:
        if generation_config not in ("auto", "vllm"):
            raise UnsupportedError(f"generation_config is {shown(generation_config)}; wanted auto or vllm")
        given: dict[str, Any] = {**settings, "gpu_memory_utilization": gpu_memory_utilization}
        given |= {"hf_token": hf_token} if isinstance(hf_token, str) else {}
        self._takes_defaults = generation_config == "auto"
        self._tokenizer: Any = None
        self.runtime = Runtime.from_pretrained(model, compile=not enforce_eager, **_ours(given))

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: Any = None,
        priority: list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The answers to each prompt, in order; no bar is drawn, whatever use_tqdm says."""
        _refuse(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        asked = [prompt_of(prompt) for prompt in each_prompt(prompts)]
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", given, len(asked))
        ranks = _one_each("priority", 0 if priority is None else priority, len(asked))
        together: dict[tuple[int, str], list[int]] = defaultdict(list)
        for index, (_, _, salt) in enumerate(asked):
            options = RequestOptions(priority=ranks[index], cache_salt=salt)
            together[options.priority, options.cache_salt].append(index)
        answered: dict[int, RequestOutput] = {}
        for (rank, salt), indices in sorted(together.items()):
            found = self.runtime.generate(
                [asked[index][0] for index in indices],
                [_checked(params[index]).to_lamina() for index in indices],
                priority=rank,
                cache_salt=salt,
            )
            for index, output in zip(indices, found, strict=True):
                answered[index] = RequestOutput.of(output, asked[index][1])
        return [answered[index] for index in range(len(asked))]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The answers to a conversation, or to each of several, through the model's chat template."""
        _refuse(mm_processor_kwargs=mm_processor_kwargs)
        given = listed("messages", messages)
        conversations = [given] if given and isinstance(given[0], Mapping) else given
        templated = partial(
            self.runtime.apply_chat_template,
            tools=tools,
            chat_template=chat_template,
            template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        prompts = [TokensPrompt(prompt_token_ids=templated(each)) for each in conversations]
        return self.generate(
            prompts,
            sampling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt; a sequence holds the prompt too, as in vLLM."""
        _refuse(lora_request=lora_request)
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is {shown(params)}; wanted a BeamSearchParams of lamina.vllm")
        asked = [prompt_of(prompt)[0] for prompt in each_prompt(prompts)]
        found = self.runtime.beam_search(asked, params.to_lamina())
        return [
            BeamSearchOutput(
                [
                    BeamSearchSequence(
                        tokens=(tokens := [*output.prompt_token_ids, *answer.token_ids]),
                        logprobs=list(answer.logprobs or ()),
                        cum_logprob=answer.cumulative_logprob or 0.0,
                        text=self.get_tokenizer().decode(tokens),
                        finish_reason=answer.finish_reason,
                        stop_reason=answer.stop_reason,
                    )
                    for answer in output.outputs
                ]
            )
            for output in found
        ]

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            folder = self.runtime.config.tokenizer or self.runtime._open.resolved.folder
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is drawn with where nothing is given: the checkpoint's own, or vLLM's neutral ones."""
        named = self.runtime.stats()["resolved"]["sampling_defaults"]
        if not self._takes_defaults:
            return SamplingParams()
        wanted = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return SamplingParams.from_optional(**{name: named[name] for name in wanted})

    def close(self) -> None:
        """Give memory back, which vLLM leaves to the end of the process."""
        self.runtime.close()

    if not TYPE_CHECKING:  # a checker that saw it would take any name for one of these

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"LLM has no {name!r} here: it generates, chats and searches beams")


def _ours(settings: dict[str, Any]) -> dict[str, Any]:
    """vLLM's settings by our names; what cannot be honoured raises by name."""
    ours: dict[str, Any] = {}
    for name, value in settings.items():
        if name in OURS:
            names = OTHER_VALUES.get(name, {})
            taken = names.get(value, value) if isinstance(value, str) else value
            ours |= {} if value is None else {OURS[name]: taken}
        elif name not in NEUTRAL:
            raise UnknownSettingError(f"LLM has no {name!r} here; {hint(name, (*OURS, *NEUTRAL), SETTINGS)}")
        elif value not in NEUTRAL[name]:
            wanted = " or ".join(map(repr, NEUTRAL[name]))
            raise UnsupportedError(f"{name} is {shown(value)}; Lamina can do no more than {wanted}")
    return ours


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts; wanted one each")
    return list(values)


def _checked(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is {shown(params)}; wanted a SamplingParams of lamina.vllm")
    return params


def _refuse(**given: Any) -> None:
    """What no model here can honour."""
    for name, value in given.items():
        if value:
            raise UnsupportedError(f"{name} is {shown(value)}; Lamina has no such thing; leave it out")
