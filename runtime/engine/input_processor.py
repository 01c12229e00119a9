"""The input processor: calls become requests of the core, prompts token ids, parameters are resolved."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...common.errors import RequestError, UnsupportedError, shown
from ...models.pooling.spec import PoolingSpec
from ..adapters.names import AdapterNames
from ..prompts import Params, Prompt, Prompts, as_list, check_prompt, checked_kind, each, one_each
from ..protocol.core_description import CoreDescription
from ..protocol.engine_request import EngineRequest
from ..request_options import RequestOptions
from ..sampling_params import (
    SamplingDefaults,
    SamplingParams,
    check_ids,
    check_logprobs,
    for_chat,
    resolve_bad_words,
    stopping_token_ids,
)
from ..structured_output.compiler import GrammarCompiler
from ..structured_output.excluded_tokens import check_beginning, check_reasoning_end
from ..structured_output.grammar import grammar_of
from ..tokenization.chat_messages import Messages
from ..tokenization.detokenizer import IncrementalDetokenizer, detokenizer_of
from ..tokenization.tokenizer import Tokenizer
from .beam_driver import Searched
from .beam_search import BeamSearch, BeamSearchParams
from .logprobs import formatter_of
from .output_processor import Answer, Submission
from .parallel_sampling import ParentRequest, params_of_each

GENERATES = ("generate",)
HINTS = {"embed": '; pooling="last" or "mean" would have it make vectors, too'}
SEED_STEP = 0x9E3779B97F4A7C15  # odd and without a pattern, so that unseeded requests draw apart


@dataclass(frozen=True, kw_only=True, slots=True)
class InputProcessor:
    """Checks what callers ask, before anything is queued, and gives each request all it needs to be answered.

    What is wrong raises RequestError, saying which argument, and where it is one of many prompts, which.
    """

    tokenizer: Tokenizer | None
    defaults: SamplingDefaults  # the checkpoint's, for what a request leaves open
    chat_defaults: SamplingDefaults | None  # likewise in chats, before CHAT_DEFAULTS; None: neither counts
    eos_token_ids: frozenset[int]
    vocab_size: int
    num_valid_ids: int  # ids from here on are padding of the vocabulary
    max_model_len: int
    declared_len: int | None  # positions that the checkpoint declares
    capacity_tokens: int  # of the KV cache
    seed: int  # of requests that bring none, with the number of each
    pooling: PoolingSpec | None = None  # how the model makes vectors and the like; None: it only generates
    grammars: GrammarCompiler | None = None  # without a tokenizer there is none
    adapters: AdapterNames = field(default_factory=AdapterNames)  # that requests may name
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _last_resolved: list[tuple[SamplingParams, SamplingParams]] = field(default_factory=list)  # one for many

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens that a prompt may have: one new one is to fit beside them."""
        return min(self.max_model_len - 1, self.capacity_tokens)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What may be asked of the model: some of "generate", "embed", "classify" and "score"."""
        return GENERATES if self.pooling is None else self.pooling.tasks

    def require_task(self, task: str) -> None:
        """Raise UnsupportedError for what the model does not do, saying what it does."""
        if task not in self.tasks:
            hint = HINTS.get(task, "") if self.tasks == GENERATES else ""
            raise UnsupportedError(f"this model does not {task}; it serves {', '.join(self.tasks)}{hint}")

    def next_id(self) -> str:
        """Returns a request id that no other request has."""
        return str(next(self._numbers))

    def prepare_each(
        self, prompts: Prompts, params: Params, options: RequestOptions
    ) -> Iterator[ParentRequest]:
        """Returns what is to be written to each prompt, one or many, in order; made when it is asked for."""
        listed = as_list(prompts)
        own = one_each(params, len(listed))
        return each(listed, lambda index, prompt: self._prepare(prompt, own[index], options))

    def prepare_stream(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions
    ) -> ParentRequest:
        """Returns what is to be written to one prompt, piece by piece."""
        answers = self.prepare_one(prompt, params, options)
        answers.require_streamable()
        return answers

    def prepare_one(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        asked_id: str | None = None,
    ) -> ParentRequest:
        """Returns what is to be written to one prompt, token by token; asked_id: what the caller calls it."""
        return self._prepare(checked_kind(prompt), params, options, asked_id, is_streamed=True)

    def prepare_ids(
        self, token_ids: tuple[int, ...], params: SamplingParams, options: RequestOptions, asked_id: str
    ) -> ParentRequest:
        """As prepare_one(), of ids that prompt_ids() has returned: they are not looked at again."""
        self.require_task("generate")
        return self._prepared(None, token_ids, params, options, asked_id, is_streamed=True)

    def prepare_searches(self, prompts: Prompts, params: BeamSearchParams | None) -> list[Searched]:
        """Returns a beam search for each prompt."""
        given = _beam_params(params)
        return [*each(as_list(prompts), lambda _, prompt: self._search(prompt, given))]

    def prepare_search(
        self, prompt: Prompt, params: BeamSearchParams | None, asked_id: str | None
    ) -> Searched:
        """Returns a beam search for one prompt; asked_id: what the caller calls it."""
        return self._search(checked_kind(prompt), _beam_params(params), asked_id)

    def chat_params(self, params: SamplingParams | None) -> SamplingParams:
        """Returns what a chat is sampled with: as given, else as the checkpoint says, else CHAT_DEFAULTS."""
        return for_chat(SamplingParams() if params is None else params, self.chat_defaults)

    def chat_prompt(
        self,
        messages: Messages,
        tools: Messages | None,
        template_kwargs: Mapping[str, Any] | None,
        continue_final_message: bool,
        chat_template: str | None,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Returns the token ids of a conversation, by the model's chat template or the one given."""
        self.require_task("generate")
        given = messages, add_generation_prompt, tools, self.max_prompt_tokens, template_kwargs
        tokenizer = self.tokenizer_for("a chat")
        return tokenizer.apply_chat_template(*given, continue_final_message, chat_template)

    def prompt_ids(
        self, prompt: Prompt, *, add_special_tokens: bool | None = None, keep: int | None = None
    ) -> tuple[int, ...]:
        """Returns a prompt as token ids that can be served here, RequestError for one that cannot.

        keep: so many of its last tokens, -1 for as many as fit; otherwise all. add_special_tokens: as
        Tokenizer.encode has it.
        """
        if isinstance(prompt, str):
            most = self.max_prompt_tokens if keep is None else None
            tokenizer = self.tokenizer_for("a text prompt")
            prompt = tokenizer.encode(prompt, add_special_tokens, max_tokens=most)
        if keep is not None:
            keep = self.max_prompt_tokens if keep == -1 else keep
            prompt = prompt[max(0, len(prompt) - keep) :]
        return check_prompt(
            prompt,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            capacity_tokens=self.capacity_tokens,
            declared_len=self.declared_len,
        )

    def template_reads(self, name: str, chat_template: str | None = None) -> bool:
        """Whether the chat template, the model's or the one given, reads a variable of that name."""
        return self.tokenizer_for("a chat").template_reads(name, chat_template)

    def grammar_of(self, params: SamplingParams) -> str | None:
        """Returns the grammar of structured_outputs, None without; RequestError where it cannot be enforced.

        The first for a tokenizer takes about a second; others, and each form once, some milliseconds.
        """
        form = params.structured_outputs
        if form is None:
            return None
        if self.grammars is None:
            raise RequestError(
                "structured_outputs needs a tokenizer, and this model has none; give tokenizer="
            )
        if params.ignore_eos:
            raise RequestError("ignore_eos is True; wanted False with structured_outputs, which say the end")
        grammar = grammar_of(form, self.grammars.structural_tokens)
        self.grammars.compiled(grammar)  # so that what cannot be enforced raises now
        return grammar

    def warnings_of(self, params: SamplingParams) -> list[str]:
        """Returns what of structured_outputs is not enforced, in words; RequestError as grammar_of()."""
        grammar = self.grammar_of(params)
        return [] if grammar is None or self.grammars is None else self.grammars.warnings(grammar)

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        asked_id: str | None = None,
        *,
        is_streamed: bool = False,
    ) -> ParentRequest:
        self.require_task("generate")
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError(f"params is {shown(params)}; wanted a SamplingParams")
        text, ids = prompt if isinstance(prompt, str) else None, self.prompt_ids(prompt)
        return self._prepared(
            text, ids, params or SamplingParams(), options, asked_id, is_streamed=is_streamed
        )

    def _prepared(
        self,
        text: str | None,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        options: RequestOptions,
        asked_id: str | None,
        *,
        is_streamed: bool,
    ) -> ParentRequest:
        number = next(self._numbers)
        resolved = self._resolved(params, number)
        grammar = self.grammar_of(resolved)
        if grammar is not None and (resolved.bad_words or resolved.allowed_token_ids):
            self._check_excluded(grammar, token_ids, resolved)
        resolved = resolved.without_form()
        submissions = []
        for index, own in enumerate(params_of_each(resolved)):
            request_id = str(number) if index == 0 else f"{number}-{index}"
            new_detokenizer = self._detokenizer(token_ids, own)
            wants_each_token = is_streamed or new_detokenizer is not None
            request = self._request(request_id, token_ids, own, options, wants_each_token, grammar)
            answer = Answer(
                request_id=request_id,
                asked_id=str(number) if asked_id is None else asked_id,
                index=index,
                new_detokenizer=new_detokenizer,
                stop_token_ids=frozenset(own.stop_token_ids or ()),
                formatter=formatter_of(resolved, index, self.tokenizer),
                wants_cumulative=own.logprobs is not None,
            )
            submissions.append(Submission(request, answer))
        return ParentRequest(
            prompt=text,
            num_wanted=resolved.n,
            submissions=tuple(submissions),
        )

    def _check_excluded(self, grammar: str, token_ids: tuple[int, ...], params: SamplingParams) -> None:
        """Raise RequestError where a request excludes what its form cannot do without, as far as is seen."""
        assert self.grammars is not None
        if params.structured_outputs is not None:
            check_reasoning_end(params.structured_outputs, self.grammars.structural_tokens, params)
        check_beginning(self.grammars.matcher(grammar), token_ids, params)

    def _resolved(self, params: SamplingParams, number: int) -> SamplingParams:
        """Returns parameters with nothing left open, of which the model can honour all."""
        seed = (self.seed + (number + 1) * SEED_STEP) % 2**63
        known = next((own for given, own in self._last_resolved if given is params), None)
        if known is not None:
            return known.with_seed(seed) if params.seed is None else known
        resolved = resolve_bad_words(params.resolve(self.defaults, seed=seed), self._encode_word)
        check_ids(resolved, stopping_token_ids(resolved, self.eos_token_ids), self.num_valid_ids)
        check_logprobs(resolved, self.num_valid_ids)
        if not params.logits_processors:  # which would be held here
            self._last_resolved[:] = [(params, resolved)]
        return resolved

    def _request(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        options: RequestOptions,
        wants_each_token: bool,
        grammar: str | None,
    ) -> EngineRequest:
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            stop_token_ids=stopping_token_ids(params, self.eos_token_ids),
            max_total_tokens=total_tokens(len(token_ids), params, self.max_model_len),
            priority=options.priority,
            timeout=options.timeout,
            cache_salt=options.cache_salt,
            adapter=self.adapters.digest_of(options.adapter),
            grammar=grammar,
            wants_each_token=wants_each_token,
        )

    def _search(self, prompt: Prompt, params: BeamSearchParams, asked_id: str | None = None) -> Searched:
        self.require_task("generate")
        token_ids, num_ids, width = self.prompt_ids(prompt), self.num_valid_ids, params.beam_width
        if width > num_ids:
            raise RequestError(f"beam_width is {width}; wanted at most {num_ids}, the number of tokens")
        check_ids(SamplingParams(stop_token_ids=params.stop_token_ids), (), num_ids)
        room = self.max_prompt_tokens + 1 - len(token_ids)
        name = str(next(self._numbers))
        return Searched(
            name=name,
            asked_id=name if asked_id is None else asked_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            search=BeamSearch(params, self.eos_token_ids, room=room, vocab_size=num_ids),
        )

    def tokenizer_for(self, purpose: str) -> Tokenizer:
        """Returns the model's tokenizer; RequestError where it has none, saying what it was wanted for."""
        if self.tokenizer is None:
            raise RequestError(
                f"{purpose} needs a tokenizer, and the model's folder has none; give token ids or tokenizer="
            )
        return self.tokenizer

    def _encode_word(self, word: str) -> list[int]:
        tokenizer = self.tokenizer_for(f"bad_words={shown(word)}")
        return tokenizer.encode(word, add_special_tokens=False)

    def _detokenizer(
        self, token_ids: Sequence[int], params: SamplingParams
    ) -> Callable[[], IncrementalDetokenizer] | None:
        """Returns what makes a detokenizer of the answer, None where it has no text."""
        if params.detokenize is False or (params.detokenize is None and self.tokenizer is None):
            if params.stop:
                got = f"stop is {shown(params.stop)}"
                raise RequestError(f"{got}, but there is no text to look for it in; use stop_token_ids")
            return None
        return partial(detokenizer_of, params, token_ids, self.tokenizer_for("detokenize=True"))


def total_tokens(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> int:
    """Returns how many tokens prompt and output may come to together."""
    if params.max_tokens is None:
        return max_model_len
    return min(num_prompt_tokens + params.max_tokens, max_model_len)


def input_processor(
    description: CoreDescription, tokenizer: Tokenizer | None, grammars: GrammarCompiler | None = None
) -> InputProcessor:
    """Returns the input processor for a core that so describes itself, with the model's tokenizer if any.

    grammars: the core's own, where it is at hand, so that each is compiled once.
    """
    defaults = description.defaults
    if grammars is None and tokenizer is not None:
        grammars = grammar_compiler(tokenizer, description.num_valid_ids, description.eos_token_ids)
    return InputProcessor(
        tokenizer=tokenizer,
        defaults=defaults,
        chat_defaults=defaults if description.generation_defaults else None,
        eos_token_ids=frozenset(description.eos_token_ids),
        vocab_size=description.vocab_size,
        num_valid_ids=description.num_valid_ids,
        max_model_len=description.max_model_len,
        declared_len=description.declared_len,
        capacity_tokens=description.capacity_tokens,
        seed=description.seed,
        pooling=description.pooling,
        grammars=grammars,
    )


def grammar_compiler(
    tokenizer: Tokenizer, num_valid_ids: int, eos_token_ids: Iterable[int]
) -> GrammarCompiler:
    """Returns a compiler of grammars for a model's tokenizer; it does nothing before it is asked."""
    return GrammarCompiler(
        tokenizer.as_json,
        num_valid_ids=num_valid_ids,
        eos_token_ids=sorted(eos_token_ids),
        structural_tokens=lambda: tokenizer.structural_tokens,
    )


def _beam_params(params: BeamSearchParams | None) -> BeamSearchParams:
    if params is not None and not isinstance(params, BeamSearchParams):
        raise RequestError(f"params is {shown(params)}; wanted a BeamSearchParams")
    return params or BeamSearchParams()
