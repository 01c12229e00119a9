"""What a user holds: a model ready to generate, stream and chat."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import torch

from ..common.errors import ClosedError, ConfigError, RequestError, shown
from ..common.progress import Progress, say_nothing
from ..compiler.torch_internals.torch_section import outside_dynamo
from ..custom_ops._shared.ledger import watched
from .config import RuntimeConfig
from .engine.beam_driver import BeamRounds, Searched
from .engine.beam_search import BeamSearch, BeamSearchParams
from .engine.client import Guard, Ticket
from .engine.logprobs import teller_of
from .engine.output_processor import Generation, Reader
from .engine.outputs import RequestOutput, StreamDelta
from .engine.parallel_sampling import Answers, new_deltas, params_of_each
from .keywords import RequestSettings, RuntimeSettings
from .prompts import Params, Prompt, Prompts, as_list, checked_kind, each, one_each
from .sampling_params import (
    SamplingParams,
    check_ids,
    check_reports,
    for_chat,
    settle_words,
    stopping_token_ids,
)
from .scheduler.request import RequestOptions, check_prompt, request_of
from .startup.forks import require_same_process
from .startup.loader import Loaded, load, note_use
from .stats import collect_stats, explanation_of, page_of
from .tokenization.chat_messages import Messages
from .tokenization.detokenizer import IncrementalDetokenizer, detokenizer_of
from .tokenization.tokenizer import Tokenizer

T = TypeVar("T")
SEED_STEP = 0x9E3779B97F4A7C15  # odd and without a pattern, so that unseeded requests draw apart


@outside_dynamo
class Runtime:
    """A loaded model; leaving the `with` block, or close(), gives everything back."""

    def __init__(self, config: RuntimeConfig, progress: Progress | None = None) -> None:
        if not isinstance(config, RuntimeConfig):
            raise ConfigError(
                f"config is {shown(config)}; wanted a RuntimeConfig, or Runtime.from_pretrained(model, ...)"
            )
        self.config = config
        self._loaded: Loaded | None = load(config, progress or say_nothing)
        self._pid = os.getpid()
        self._ids = itertools.count()
        self._guard = Guard(self._loaded.engine)

    @classmethod
    def from_pretrained(
        cls, model: str | Path, *, progress: Progress | None = None, **settings: Unpack[RuntimeSettings]
    ) -> Self:
        """A runtime for a folder of safetensors, a .gguf file or a hub id.

        settings: the fields of RuntimeConfig. progress(stage, fraction, detail) is called while loading.
        Raises ConfigError for a setting that cannot be honoured, LoadError for files that cannot be read,
        UnsupportedError for a model or backend that does not run here, CompileError where compiling fails,
        NotWarmError where require_warm and anything would have to be compiled, traced or built.
        """
        return cls(RuntimeConfig(model=model, **settings), progress)

    def generate(
        self, prompts: Prompts, params: Params = None, **options: Unpack[RequestSettings]
    ) -> list[RequestOutput]:
        """The answer to each prompt, in order; all are checked before the first is started.

        options: the fields of RequestOptions.
        """
        asked = self._prepare_each(as_list(prompts), params, RequestOptions(**options))
        self._run([generation for answers in asked for generation in answers.generations])
        return [answers.output() for answers in asked]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestSettings]
    ) -> Iterator[StreamDelta]:
        """The answer to one prompt as it is written; options are the fields of RequestOptions.

        The prompt is checked now and queued when the first piece is asked for; closing the iterator, or
        dropping it, aborts the request. Pieces of several answers come in turns, each with its index.
        """
        answers = self._prepare(checked_kind(prompt), params, RequestOptions(**options))
        if len(answers.generations) > answers.num_wanted:
            raise RequestError(
                f"best_of is {len(answers.generations)}, above n {answers.num_wanted}; wanted none in a "
                "stream, as the best answers are known when all have ended; use generate()"
            )
        return self._stream(answers, answers.readers())

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams | None = None, **options: Unpack[RequestSettings]
    ) -> list[RequestOutput]:
        """The likeliest continuations of each prompt, the best first; options are those of generate()."""
        params = BeamSearchParams() if params is None else params
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is {shown(params)}; wanted a BeamSearchParams")
        rounds = BeamRounds(RequestOptions(**options), self._run)
        searched = each(as_list(prompts), lambda _, prompt: self._searched(prompt, params))
        rounds.run(searched)
        for each_search in searched:
            self._guarded(partial(_count, each_search))
        return [each.output(self._open.tokenizer) for each in searched]

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
        """The answer to a conversation, [{"role": …, "content": …}, …], through the model's chat template.

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
        """chat(), as it is written."""
        template = tools, template_kwargs, continue_final_message, chat_template
        ids = self.apply_chat_template(messages, *template)
        return self.stream(ids, self.chat_params(params), **options)

    def chat_params(self, params: SamplingParams | None = None) -> SamplingParams:
        """What a chat is sampled with: as given, then as the checkpoint says, then by CHAT_DEFAULTS."""
        defaults = self._open.defaults if self.config.generation_defaults else None
        return for_chat(SamplingParams() if params is None else params, defaults)

    def apply_chat_template(
        self,
        messages: Messages,
        tools: Messages | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids of a conversation, the others of its arguments being those of chat().

        add_generation_prompt: ready for an answer; otherwise they end with the last message.
        """
        given = messages, add_generation_prompt, tools, self._most_tokens, template_kwargs
        return self._tokenizer("a chat").apply_chat_template(*given, continue_final_message, chat_template)

    def warm_up(self) -> None:
        """Answer short prompts in every way that has kernels of its own; note that for later starts."""
        few: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
        for temperature in (0.0, 1.0):
            self.generate([0], SamplingParams(temperature=temperature, **few))
        adjusted = SamplingParams(temperature=1.0, typical_p=0.9, presence_penalty=1.0, logprobs=1, **few)
        self.generate([0], adjusted)
        note_use(self._open)

    def idle(self) -> bool:
        """Use a moment without requests to record one size; False where none is left, or a request is live.

        Only with CompileConfig(cuda_graphs="lazy"), which serves at once and leaves recording to the caller.
        """
        return self._guarded(_record_one)

    def explain_html(self) -> str:
        """explain() as one page of HTML that needs no other file, with what recordings cost and padded."""
        return self._look(page_of)

    def suspend(self) -> None:
        """Drop every recording, which no snapshot or fork of the process may hold; serving goes on without.

        Raises RequestError while requests are live.
        """
        self._guarded(_forget_recordings)

    def resume(self) -> None:
        """Record every size again, after suspend()."""
        while self.idle():
            pass

    def stats(self) -> dict[str, Any]:
        """Counters and settings, under names that stay."""
        return self._look(collect_stats)

    def explain(self) -> str:
        """What was compiled: unique pieces, what the passes did to each, its kernels and matrix products."""
        return explanation_of(self._open)

    def close(self) -> None:
        """Abort what is running and give back memory; a second call does nothing."""
        if self._pid == os.getpid():  # in a forked child nothing of it works
            self._guard(self._close)

    def _close(self) -> None:
        loaded = self._loaded
        if loaded is None:
            return
        loaded.engine.close()
        if loaded.assembled.recording is not None:
            loaded.assembled.recording.close()
        self._guard.engine = self._loaded = None
        if loaded.parts.resolved.device.type == "cuda":
            del loaded
            torch.cuda.empty_cache()  # torch would keep it, and who loads next would find the card full

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _open(self) -> Loaded:
        require_same_process(self._pid)
        if self._loaded is None:
            raise ClosedError("this runtime was closed; make a new one with Runtime.from_pretrained")
        return self._loaded

    def _tokenizer(self, purpose: str) -> Tokenizer:
        tokenizer = self._open.tokenizer
        if tokenizer is None:
            raise RequestError(
                f"{purpose} needs a tokenizer, and the model's folder has none; give token ids or tokenizer="
            )
        return tokenizer

    def _prepare_each(
        self, prompts: Sequence[Prompt], params: Params, options: RequestOptions
    ) -> list[Answers]:
        own = one_each(params, len(prompts))
        return each(prompts, lambda index, prompt: self._prepare(prompt, own[index], options))

    def _checked(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt as token ids that can be served here."""
        loaded = self._open
        if isinstance(prompt, str):
            prompt = self._tokenizer("a text prompt").encode(prompt, max_tokens=self._most_tokens)
        return check_prompt(
            prompt,
            vocab_size=loaded.parts.model.vocab_size,
            max_model_len=loaded.resolved.max_model_len,
            capacity_tokens=loaded.assembled.kv_cache.capacity_tokens,
            declared_len=loaded.parts.model.max_position_embeddings,
        )

    @property
    def _most_tokens(self) -> int:
        """That a prompt may have."""
        loaded = self._open
        return min(loaded.resolved.max_model_len - 1, loaded.assembled.kv_cache.capacity_tokens)

    def _searched(self, prompt: Prompt, params: BeamSearchParams) -> Searched:
        """A search that is checked; nothing is queued yet."""
        loaded, checked = self._open, self._checked(prompt)
        num_ids, width = loaded.parts.num_valid_ids, params.beam_width
        if width > num_ids:
            raise RequestError(f"beam_width is {width}; wanted at most {num_ids}, the number of tokens")
        check_ids(SamplingParams(stop_token_ids=params.stop_token_ids), (), num_ids)
        room = self._most_tokens + 1 - len(checked)
        return Searched(
            name=str(next(self._ids)),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=checked,
            search=BeamSearch(params, loaded.eos_token_ids, room=room, vocab_size=num_ids),
        )

    def _prepare(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> Answers:
        """Requests that are checked and have all they need; nothing is queued yet."""
        loaded = self._open
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError(f"params is {shown(params)}; wanted a SamplingParams")
        checked = self._checked(prompt)
        number = next(self._ids)
        seed = (self.config.seed + (number + 1) * SEED_STEP) % 2**63
        resolved = (params or SamplingParams()).resolve(loaded.defaults, seed=seed)
        resolved = settle_words(resolved, self._encode_word)
        check_ids(resolved, stopping_token_ids(resolved, loaded.eos_token_ids), loaded.parts.num_valid_ids)
        check_reports(resolved, loaded.parts.num_valid_ids)
        each = params_of_each(resolved)
        names = [str(number), *(f"{number}-{index}" for index in range(1, len(each)))]
        return Answers(
            prompt=prompt if isinstance(prompt, str) else None,
            num_wanted=resolved.n,
            generations=tuple(
                Generation(
                    request=request_of(
                        names[index],
                        checked,
                        own,
                        options,
                        eos_token_ids=loaded.eos_token_ids,
                        max_model_len=loaded.resolved.max_model_len,
                    ),
                    asked_id=names[0],
                    index=index,
                    new_detokenizer=self._detokenizer(checked, own),
                    teller=teller_of(resolved, index, loaded.tokenizer),
                )
                for index, own in enumerate(each)
            ),
        )

    def _encode_word(self, word: str) -> list[int]:
        return self._tokenizer(f"bad_words={shown(word)}").encode(word, add_special_tokens=False)

    def _detokenizer(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> Callable[[], IncrementalDetokenizer] | None:
        if params.detokenize is False or (params.detokenize is None and self._open.tokenizer is None):
            if params.stop:
                got = f"stop is {shown(params.stop)}"
                raise RequestError(f"{got}, but there is no text to look for it in; use stop_token_ids")
            return None
        return partial(detokenizer_of, params, prompt, self._tokenizer("detokenize=True"))

    def _run(self, generations: Sequence[Generation]) -> None:
        """See these to their ends, or end what is left of them."""
        ticket = Ticket()
        try:
            self._guarded(lambda _: self._guard.start(ticket, generations))
            for generation in generations:
                while not generation.told.is_over:
                    self._step()
                if generation.error is not None:
                    raise generation.error
        finally:
            self._guard.drop(ticket)

    def _step(self) -> None:
        self._guarded(_step)

    def _guarded(self, action: Callable[[Loaded], T]) -> T:
        """Let something happen to what is loaded, for one thread at a time."""
        require_same_process(self._pid)  # whose lock a thread may hold that is not there
        return self._guard(lambda: action(self._open))

    def _look(self, read: Callable[[Loaded], T]) -> T:
        """Read something of what is loaded, for one thread at a time, even inside of a step."""
        require_same_process(self._pid)
        return self._guard.look(lambda: read(self._open))

    def _stream(self, answers: Answers, readers: Sequence[Reader]) -> Iterator[StreamDelta]:
        ticket = Ticket()
        try:
            self._guarded(lambda _: self._guard.start(ticket, answers.generations))
            while True:
                yield from new_deltas(readers)
                for reader in readers:
                    if reader.error is not None:
                        raise reader.error
                if all(reader.is_done for reader in readers):
                    return
                self._step()
        finally:
            self._guard.drop(ticket)


def _step(loaded: Loaded) -> None:
    with watched(loaded.late_builds):
        loaded.engine.step()


def _count(searched: Searched, loaded: Loaded) -> None:
    loaded.engine.count_whole(searched.times, searched.num_tokens)


def _record_one(loaded: Loaded) -> bool:
    with watched(loaded.late_builds):
        return loaded.engine.idle()


def _forget_recordings(loaded: Loaded) -> None:
    if loaded.engine.scheduler.has_work:
        raise RequestError("suspend while requests are live; wait for them or abort them first")
    loaded.engine.forget_recordings()
