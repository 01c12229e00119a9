"""A runtime as lm-eval's harness sees a model: likelihoods of texts, and answers up to a stop."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm  # type: ignore[import-untyped]

from ..common.errors import RequestError
from .engine.outputs import RequestOutput
from .runtime import Runtime
from .sampling_params import SamplingParams
from .tokenization.tokenizer import Tokenizer

AT_ONCE = 256  # requests that one call of the runtime is given, so that their log-probabilities fit in memory
T = TypeVar("T")
Scored = tuple[float, bool]  # log-likelihood, and whether it is what would be answered greedily


class RuntimeLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """What lm_eval.simple_evaluate(model=RuntimeLM(runtime), …) asks; batches and order are the runtime's.

    max_gen_toks: tokens of an answer where a task names no number. Texts longer than the context lose their
    beginning, as in lm-eval's other models. Raises RequestError for a runtime without a tokenizer.
    """

    def __init__(self, runtime: Runtime, *, max_gen_toks: int = 256) -> None:
        super().__init__()
        if runtime.tokenizer is None:
            raise RequestError("lm-eval asks texts, and this runtime has no tokenizer; give tokenizer=")
        self._runtime = runtime
        self._texts: Tokenizer = runtime.tokenizer
        self.max_gen_toks = max_gen_toks
        self.max_length: int = runtime.max_prompt_tokens

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text, 0 for a tokenizer that has none."""
        return next(iter(self._texts.eos_token_ids), 0)

    @property
    def prefix_token_id(self) -> int:
        """The id before a text that has nothing before it."""
        bos = self._texts.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keys its cache of rendered requests by."""
        return str(self._runtime.config.tokenizer or self._runtime.config.model)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the token ids of a text; by default with BOS where the tokenizer adds one."""
        return self._texts.encode(string, add_special_tokens=add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns what tells templates apart in lm-eval's cache and in its results."""
        return f"{self.tokenizer_name}: {chat_template}"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a conversation as the model's chat template writes it."""
        goes_on = not add_generation_prompt
        return self._texts.render_chat(chat_history, add_generation_prompt, continue_final_message=goes_on)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the answer to each (context, settings), cut before the first of its stop strings."""
        answers: list[str] = []
        for some in self._parts(requests, disable_tqdm):
            asked = [self._asked(*request.args) for request in some]
            outputs = self._runtime.generate([ids for ids, _, _ in asked], [params for _, params, _ in asked])
            for request, output, (_, _, stops) in zip(some, outputs, asked, strict=True):
                answers.append(postprocess_generated_text(output.text, stops, None))
                self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each whole text, in windows where it is longer than the context."""
        totals = []
        for request in tqdm(requests, disable=disable_tqdm):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            scored = self._scored([make_disjoint_window(window) for window in windows])
            totals.append(math.fsum(likelihood for likelihood, _ in scored))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **settings: Any,
    ) -> list[Scored]:
        found: list[Scored] = []
        for some in self._parts(requests, disable_tqdm):
            scored = self._scored([(context, continuation) for _, context, continuation in some])
            for (texts, _, _), score in zip(some, scored, strict=True):
                self.cache_hook.add_partial("loglikelihood", texts, score)
            found += scored
        return found

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        prompts = [(context + continuation)[-self.max_length :] for context, continuation in pairs]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self._runtime.generate(prompts, params)
        return [
            _score(output, len(continuation))
            for output, (_, continuation) in zip(outputs, pairs, strict=True)
        ]

    def _asked(self, context: str, settings: dict[str, Any]) -> tuple[list[int], SamplingParams, list[str]]:
        """A prompt's ids, its parameters and stop strings; RequestError for a setting that there is not."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(settings, self.max_gen_toks))
        until, wanted = [text for text in given.pop("until", ()) if text], given.pop("max_gen_toks")
        given.pop("do_sample", None)
        ids, max_tokens = maybe_truncate(
            self.tok_encode(context),
            max_gen_toks=wanted,
            max_model_len=self.max_length + 1,
            shrink_gen_toks=wanted > self.max_length,
        )
        return ids, SamplingParams(max_tokens=max_tokens, stop=until, **given), until

    def _parts(self, requests: Sequence[T], disable_tqdm: bool) -> Iterator[list[T]]:
        with tqdm(total=len(requests), disable=disable_tqdm) as bar:
            for some in _chunks(requests, AT_ONCE):
                yield some
                bar.update(len(some))


def _score(output: RequestOutput, num_scored: int) -> Scored:
    """The log-likelihood of a prompt's last tokens, and whether each was the likeliest in its place."""
    found = (output.prompt_logprobs or ())[len(output.prompt_token_ids) - num_scored :]
    ids = output.prompt_token_ids[len(output.prompt_token_ids) - num_scored :]
    own = [each[id_] for each, id_ in zip(found, ids, strict=True) if each is not None]
    return math.fsum(each.logprob for each in own), all(each.rank == 1 for each in own)


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    source = iter(items)
    while some := list(islice(source, size)):
        yield some
