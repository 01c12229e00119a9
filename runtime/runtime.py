"""What a user holds: a model ready to generate, stream and chat."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, Unpack

import torch

from ..common.errors import ConfigError, shown
from ..common.forks import require_same_process
from ..common.progress import Progress, say_nothing
from ..compiler.torch_internals.torch_section import outside_dynamo
from .adapters.names import LoadedAdapter, checked_path
from .config import RuntimeConfig
from .engine.beam_driver import BeamRounds
from .engine.beam_search import BeamSearchParams
from .engine.client import Client, runtime_closed
from .engine.input_processor import InputProcessor, input_processor
from .engine.outputs import RequestOutput, StreamDelta
from .engine.pooling_outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
from .engine.pooling_processor import PoolingProcessor, TextOptions
from .keywords import RequestSettings, RuntimeSettings
from .prompts import Params, Prompt, Prompts
from .request_options import RequestOptions
from .sampling_params import SamplingParams
from .startup.captures import is_lazy
from .startup.description import describe
from .startup.loaded import LoadedRuntime
from .startup.loader import load
from .stats import collect_stats, explanation_of, page_of
from .tokenization.chat_messages import Messages
from .tokenization.tokenizer import Tokenizer
from .weight_messages import Weights, hand_over


@outside_dynamo
class Runtime:
    """A loaded model; the end of a `with` block, or close(), gives everything back.

    Every call but close() raises ClosedError after it, and UnsupportedError in a forked child.
    """

    def __init__(self, config: RuntimeConfig, progress: Progress | None = None) -> None:
        if not isinstance(config, RuntimeConfig):
            raise ConfigError(
                f"config is {shown(config)}; wanted a RuntimeConfig, or Runtime.from_pretrained(model, ...)"
            )
        config.parallel.require_one_engine()
        self.config, self._pid = config, os.getpid()
        self._loaded: LoadedRuntime | None = load(config, progress or say_nothing)
        self._client = Client(self._loaded.core, self._loaded.late_builds, self._loaded.first_step)
        self._input: InputProcessor | None = _input_processor(self._loaded)

    @classmethod
    def from_pretrained(
        cls, model: str | Path, *, progress: Progress | None = None, **settings: Unpack[RuntimeSettings]
    ) -> Self:
        """Returns a runtime for a folder of safetensors, a .gguf file or a hub id.

        settings: the fields of RuntimeConfig. progress(stage, fraction, detail) is called while loading.
        Raises ConfigError for a setting that cannot be honoured, LoadError for files that cannot be read,
        UnsupportedError for a model or backend that does not run here, CompileError where compiling fails,
        NotWarmError where require_warm and anything would have to be compiled, traced or built.
        """
        return cls(RuntimeConfig(model=model, **settings), progress)

    def generate(
        self, prompts: Prompts, params: Params = None, **options: Unpack[RequestSettings]
    ) -> list[RequestOutput]:
        """Returns the answer to each prompt, in order; all are checked before the first is answered.

        options: the fields of RequestOptions. Raises RequestError for a prompt, parameter or option that
        cannot be honoured, and LogitsError, ProcessorError or EngineError where an answer fails by such a
        fault; the others are ended then.
        """
        return self._client.outputs_of(self._open_input.prepare_each(prompts, params, self._options(options)))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestSettings]
    ) -> Iterator[StreamDelta]:
        """Yields the answer to one prompt as it is written; options are the fields of RequestOptions.

        The prompt is checked now and queued when the first piece is asked for; closing the iterator, or
        dropping it, aborts the request. Pieces of several answers come in turns, each with its index.
        """
        answers = self._open_input.prepare_stream(prompt, params, self._options(options))
        return self._client.stream(answers.submissions)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams | None = None, **options: Unpack[RequestSettings]
    ) -> list[RequestOutput]:
        """Returns the likeliest continuations of each prompt, the best first; options as in generate()."""
        asked = self._open_input
        given = self._options(options)
        rounds = BeamRounds(given, asked.adapters.digest_of(given.adapter))
        searched = asked.prepare_searches(prompts, params)
        for submissions in rounds.of(searched):
            self._client.run(submissions)
        for search in searched:
            self._client.count_whole(search.times, search.num_tokens)
        return [search.output(asked.tokenizer) for search in searched]

    def embed(
        self,
        texts: Prompts,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Unpack[RequestSettings],
    ) -> list[EmbeddingOutput]:
        """Returns the vector of each text, in order; docs/embeddings.md says what makes it.

        dimensions: its first so many numbers. normalize: whether it has the length 1; None: as the checkpoint
        says. prompt_name, prompt, truncate_prompt_tokens: the fields of TextOptions. Raises UnsupportedError
        for a model that makes no vectors, and otherwise as generate().
        """
        given = TextOptions(
            prompt_name=prompt_name, prompt=prompt, truncate_prompt_tokens=truncate_prompt_tokens
        )
        own = {"dimensions": dimensions, "normalize": normalize}
        asked = self._pooling.embed(texts, given, RequestOptions(**options), **own)  # type: ignore[arg-type]
        return self._pooling.embeddings(self._client.outputs_of(asked))

    def classify(
        self,
        texts: Prompts,
        *,
        activation: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Unpack[RequestSettings],
    ) -> list[ClassificationOutput]:
        """Returns the classes of each text, in order; activation: as probabilities, False for logits.

        UnsupportedError for a model without classes; other arguments and errors as of embed().
        """
        given = TextOptions(
            prompt_name=prompt_name, prompt=prompt, truncate_prompt_tokens=truncate_prompt_tokens
        )
        asked = self._pooling.classify(texts, given, RequestOptions(**options), activation=activation)
        return self._pooling.classes(self._client.outputs_of(asked))

    def score(
        self,
        query: Prompts,
        documents: Prompts,
        *,
        activation: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Unpack[RequestSettings],
    ) -> list[ScoreOutput]:
        """Returns how well each document answers a query, or each the query of its place, in order.

        By a model that reads both together, or by how near their vectors are. activation: False for the logit
        of such a model. Other arguments and errors as of embed().
        """
        given = TextOptions(
            prompt_name=prompt_name, prompt=prompt, truncate_prompt_tokens=truncate_prompt_tokens
        )
        asked, parts = self._pooling.score(
            query, documents, given, RequestOptions(**options), activation=activation
        )
        return self._pooling.scores(self._client.outputs_of(asked), parts)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What may be asked of the model: some of "generate", "embed", "classify" and "score"."""
        return self._open_input.tasks

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Messages | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **options: Unpack[RequestSettings],
    ) -> RequestOutput:
        """Returns the answer to a conversation, [{"role": …, "content": …}, …], by the model's chat template.

        tools: functions that the model may call, as JSON schemas. template_kwargs: what else the template
        reads, such as enable_thinking. continue_final_message: go on with the last message. chat_template: a
        template to use instead. RequestError where the template refuses any, or does not read tools.
        """
        template = tools, template_kwargs, continue_final_message, chat_template
        ids = self.apply_chat_template(messages, *template)
        return self.generate([ids], self.chat_params(params), **options)[0]

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Messages | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **options: Unpack[RequestSettings],
    ) -> Iterator[StreamDelta]:
        """The answer to a conversation as it is written; arguments and errors as in chat() and stream()."""
        template = tools, template_kwargs, continue_final_message, chat_template
        ids = self.apply_chat_template(messages, *template)
        return self.stream(ids, self.chat_params(params), **options)

    def load_adapter(self, name: str, path: str | Path) -> LoadedAdapter:
        """Loads a LoRA adapter of PEFT's from its folder, for requests to name it; while it serves, too.

        Raises RequestError for a name that stands for another one, UnsupportedError where the runtime has no
        room for adapters or the adapter has what is not served, LoadError and ConfigError for files amiss.
        """
        adapters, folder = self._open_input.adapters, checked_path(name, path)
        return self._client.enter(lambda core: adapters.add(name, folder, core.load_adapter(folder)))

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter: requests that have it go on to their end, later ones find none of the name."""
        adapters = self._open_input.adapters
        self._client.enter(lambda core: adapters.unload(name, core.unload_adapter))

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """The adapters that requests may name, by name."""
        return self._open_input.adapters

    def _options(self, given: RequestSettings) -> RequestOptions:
        """Returns checked options; an adapter that is not loaded is looked for by installed packages."""
        options = RequestOptions(**given)
        self._open_input.adapters.require(options.adapter, self.load_adapter)
        return options

    def chat_params(self, params: SamplingParams | None = None) -> SamplingParams:
        """Returns what a chat is sampled with: as given, else as the checkpoint says, else CHAT_DEFAULTS."""
        return self._open_input.chat_params(params)

    def apply_chat_template(
        self,
        messages: Messages,
        tools: Messages | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Returns the token ids of a conversation; its other arguments are those of chat().

        add_generation_prompt: ready for an answer; otherwise they end with the last message.
        """
        template = tools, template_kwargs, continue_final_message, chat_template
        return self._open_input.chat_prompt(messages, *template, add_generation_prompt)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None where its folder has none and none was given."""
        return self._open_input.tokenizer

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens that a prompt may have at most: one new one is to fit beside them."""
        return self._open_input.max_prompt_tokens

    def warm_up(self) -> None:
        """Answers short prompts in every way that has kernels of its own, and notes that for later starts."""
        if self._open_input.pooling is not None:
            self._client.outputs_of([self._pooling.warming()])
        if "generate" in self.tasks:
            self._answer_in_every_way()
        self._client.look(lambda: self._open.executor.collective_rpc("note_use"))

    def _answer_in_every_way(self) -> None:
        few: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
        for temperature in (0.0, 1.0):
            self.generate([0], SamplingParams(temperature=temperature, **few))
        adjusted = SamplingParams(temperature=1.0, typical_p=0.9, presence_penalty=1.0, logprobs=1, **few)
        self.generate([0], adjusted)

    def idle(self) -> bool:
        """Captures one more size; False where none is left, or a request is live.

        With CompileConfig(cuda_graphs="lazy") that is any size; with "auto" those that no start captures.
        """
        return self._client.idle()

    def explain_html(self) -> str:
        """Returns explain() as one page of HTML without other files, with what captures cost and padded."""
        return self._client.look(lambda: page_of(self._open))

    def suspend(self) -> None:
        """Drops every capture, which no snapshot or fork of the process may hold; serving goes on without.

        Raises RequestError while requests are live.
        """
        self._client.drop_captures()

    def resume(self) -> None:
        """Captures every size again, after suspend()."""
        while self.idle():
            pass

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory back until wake(): the KV cache, captures, and the weights.

        level: 1 keeps the weights in pinned host memory, and on a CPU where they are; 2 drops them, to be
        read again. What is being written keeps its tokens and is computed again from them after wake();
        threads that wait for answers go on waiting, and the thread that called this gets RequestError where
        it asks for one. Deadlines go on. RequestError for another level.
        """
        self._client.sleep(level)

    def wake(self) -> None:
        """Takes the memory again, after sleep(): with an empty prefix cache, and captures as they were.

        Does nothing where it is awake. Raises LoadError where weights that were dropped cannot be read; it
        sleeps on then, and can be woken again.
        """
        self._client.wake(capture=not is_lazy(self.config))

    def update_weights(self, weights: Weights) -> None:
        """Replaces weights in place, of the same model; nothing is compiled or captured again.

        weights: tensors by the names that checkpoints use, some or all; a folder or hub id of another
        checkpoint; or a WeightGroup that a trainer sends them to. All or nothing: names, shapes, dtypes and
        values are checked before anything is written, and RequestError, ConfigError, UnsupportedError or
        LoadError say what is amiss. The prefix cache is emptied. What is being written keeps its tokens, and
        goes on with the new weights. A drafter's weights stay. While it sleeps it takes the memory of the
        weights, and sleeps on.
        """
        hand_over(self._client.update_weights, weights, self.config.parallel)

    @property
    def is_sleeping(self) -> bool:
        """Whether sleep() was called, and wake() was not since."""
        return self._client.look(lambda: self._open.core.is_asleep)

    def stats(self) -> dict[str, Any]:
        """Returns counters and settings, under names that stay."""
        return self._client.look(lambda: collect_stats(self._open))

    def explain(self) -> str:
        """Returns what was compiled, in words: unique pieces, what passes did, kernels and GEMMs."""
        return self._client.look(lambda: explanation_of(self._open))

    def close(self) -> None:
        """Aborts what is running and gives back memory; a second call does nothing."""
        if self._pid == os.getpid():  # in a forked child nothing of it works
            self._client.close()
            self._client.look(self._give_back)  # nobody reads it meanwhile

    def _give_back(self) -> None:
        loaded = self._loaded
        if loaded is None:
            return
        if loaded.decision_log is not None:
            loaded.decision_log.close()
        self._loaded = self._input = None
        if loaded.resolved.device.type == "cuda":
            del loaded
            torch.cuda.empty_cache()  # torch would keep it, and who loads next would find the GPU full

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _open(self) -> LoadedRuntime:
        require_same_process(self._pid)
        if self._loaded is None:
            raise runtime_closed()
        return self._loaded

    @property
    def _pooling(self) -> PoolingProcessor:
        return PoolingProcessor(input=self._open_input)

    @property
    def _open_input(self) -> InputProcessor:
        """The input processor, where anything can be asked still."""
        given, _ = self._input, self._open
        assert given is not None
        return given


def _input_processor(loaded: LoadedRuntime) -> InputProcessor:
    return input_processor(describe(loaded), loaded.tokenizer, loaded.grammars)
