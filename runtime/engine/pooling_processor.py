"""Texts of which a vector, classes or a score is wanted, as requests of the core."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from ...common.errors import PromptTooLongError, RequestError, UnsupportedError, shown
from ...models.pooling.spec import PoolingSpec
from ..pooling_params import PoolingParams
from ..prompts import Prompt, Prompts, as_list, check_prompt, checked_kind
from ..protocol.engine_request import EngineRequest
from ..request_options import RequestOptions
from ..sampling_params import SamplingParams
from ..tokenization.tokenizer import Tokenizer
from ..validation import check_flag, integer
from ..validation import text as checked_text
from .input_processor import InputProcessor
from .output_processor import Answer, Submission
from .outputs import RequestOutput
from .parallel_sampling import ParentRequest
from .pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    ScoreOutput,
    classification_of,
    counts_of,
    embedding_of,
    floats,
    result_of,
    similarity,
)

NO_TOKENS = SamplingParams(temperature=0.0).resolve(None, seed=0)
QUERY, DOCUMENTS = "query", ("document", "passage", "corpus")  # names of prompts
ALL_THAT_FIT = -1
Parts = Sequence[tuple[int, ...]]  # of each score, the results that it is made of


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How texts become token ids."""

    prompt_name: str | None = None
    """Of the checkpoint's prompts, which each text begins with; otherwise its default, if it has one."""
    prompt: str | None = None
    """What each text begins with, in place of those."""
    truncate_prompt_tokens: int | None = None
    """Tokens that are kept of a longer text, its first, -1 for as many as fit; otherwise that is an error."""
    add_special_tokens: bool = True
    """Whether the tokenizer's own special tokens are added."""

    def __post_init__(self) -> None:
        for name in ("prompt_name", "prompt"):
            if getattr(self, name) is not None:
                checked_text(name, getattr(self, name))
        if self.prompt_name is not None and self.prompt is not None:
            raise RequestError("prompt_name and prompt are both given; wanted one of the two")
        check_flag("add_special_tokens", self.add_special_tokens)
        wanted = "at least 1, or -1 for as many as fit"
        keep = integer("truncate_prompt_tokens", self.truncate_prompt_tokens, wanted, low=ALL_THAT_FIT)
        if keep == 0:
            raise RequestError(f"truncate_prompt_tokens is 0; wanted {wanted}")


class Planned(NamedTuple):
    """A text that is to be made token ids, and what the caller calls it."""

    place: str
    token_ids: Callable[[], tuple[int, ...]]

    def located_ids(self) -> tuple[int, ...]:
        """Returns its token ids; an error names the place."""
        try:
            return self.token_ids()
        except RequestError as error:
            kind = PromptTooLongError if isinstance(error, PromptTooLongError) else RequestError
            raise kind(f"{self.place}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingProcessor:
    """Makes requests of texts, and of their outputs what a caller asked for, by what the checkpoint says.

    Raises RequestError for what cannot be honoured, saying which argument, and UnsupportedError for a task
    that is not the model's.
    """

    input: InputProcessor

    def spec_for(self, task: str) -> PoolingSpec:
        """Returns how the model does that task. UnsupportedError where it does not."""
        self.input.require_task(task)
        assert self.input.pooling is not None
        return self.input.pooling

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens that a text may have."""
        return min(self.input.max_model_len, self.input.capacity_tokens)

    def embed(
        self,
        texts: Prompts,
        given: TextOptions,
        options: RequestOptions,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> Iterator[ParentRequest]:
        """Returns a request for the vector of each text, made when it is asked for."""
        spec, params = self.spec_for("embed"), self.vector_params(dimensions, normalize)
        return self._prepared(self.texts(spec, _listed("texts", texts), given), params, options)

    def classify(
        self, texts: Prompts, given: TextOptions, options: RequestOptions, *, activation: bool = True
    ) -> Iterator[ParentRequest]:
        """Returns a request for the classes of each text, made when it is asked for."""
        spec = self.spec_for("classify")
        planned = self.texts(spec, _listed("texts", texts), given)
        return self._prepared(planned, self.own_params(spec, activation), options)

    def score(
        self,
        query: Prompts,
        documents: Prompts,
        given: TextOptions,
        options: RequestOptions,
        *,
        activation: bool = True,
    ) -> tuple[Iterator[ParentRequest], Parts]:
        """Returns requests, made when they are asked for, and of which of them each pair's score is made."""
        spec = self.spec_for("score")
        queries, listed = _listed("query", query), _listed("documents", documents)
        planned, parts = self.pairs(spec, queries, listed, given)
        return self._prepared(planned, self.own_params(spec, activation), options), parts

    def vector_params(self, dimensions: int | None, normalize: bool | None) -> PoolingParams:
        """Returns what a vector is cut to and whether it gets the length 1, checked."""
        spec = self.spec_for("embed")
        if normalize is not None:
            check_flag("normalize", normalize)
        if dimensions is not None:
            dimensions = integer("dimensions", dimensions, f"1 to {spec.size}", low=1, high=spec.size)
        if dimensions is not None and spec.dimensions and dimensions not in (*spec.dimensions, spec.size):
            known = ", ".join(map(str, spec.dimensions))
            raise RequestError(f"dimensions is {dimensions}; this model was trained to be cut to {known}")
        return PoolingParams(
            pooling=spec.pooling,
            dimensions=dimensions,
            normalize=spec.normalize if normalize is None else normalize,
        )

    def own_params(self, spec: PoolingSpec, activation: bool) -> PoolingParams:
        """Returns what is asked for classes or scores, or for the vectors that scores are made of."""
        check_flag("activation", activation)
        if spec.yields == "vector":
            return PoolingParams(pooling=spec.pooling, normalize=spec.normalize)
        return PoolingParams(pooling=spec.pooling, activation=spec.activation if activation else "none")

    def texts(
        self, spec: PoolingSpec, texts: Sequence[Prompt], given: TextOptions, where: str = "texts"
    ) -> list[Planned]:
        """Returns each text with its place, to be made token ids; where: what the caller calls them."""
        self._prompt(spec, given)  # an unknown name is no text's fault
        places = [where] if len(texts) == 1 else [f"{where}[{index}]" for index in range(len(texts))]
        return [
            Planned(place, partial(self.text_ids, spec, text, given))
            for place, text in zip(places, texts, strict=True)
        ]

    def pairs(
        self,
        spec: PoolingSpec,
        queries: Sequence[Prompt],
        documents: Sequence[Prompt],
        given: TextOptions,
        names: tuple[str, str] = ("query", "documents"),
    ) -> tuple[list[Planned], Parts]:
        """Returns what is to be made token ids, and of which of it the score of each pair is made.

        That is its own, of a model that reads both, or the vectors of query and document. One query goes with
        all documents.
        """
        num, num_queries = len(documents), len(queries)
        if num_queries not in (1, num):
            raise RequestError(
                f"{names[0]} holds {num_queries} and {names[1]} {num} texts; wanted one query, or as many"
            )
        if spec.yields != "vector":
            self._prompt(spec, given)
            both = zip(queries if num_queries > 1 else [*queries] * num, documents, strict=True)
            planned = [
                Planned(f"{names[1]}[{index}]", partial(self.pair_ids, spec, pair, given))
                for index, pair in enumerate(both)
            ]
            return planned, [(index,) for index in range(num)]
        planned = self.texts(spec, queries, self._of_kind(spec, given, (QUERY,)), names[0])
        planned += self.texts(spec, documents, self._of_kind(spec, given, DOCUMENTS), names[1])
        return planned, [(index if num_queries > 1 else 0, num_queries + index) for index in range(num)]

    def embeddings(self, outputs: Sequence[RequestOutput]) -> list[EmbeddingOutput]:
        """Returns vectors of outputs."""
        return [embedding_of(output) for output in outputs]

    def classes(self, outputs: Sequence[RequestOutput]) -> list[ClassificationOutput]:
        """Returns classes of outputs."""
        labels = self.spec_for("classify").labels
        return [classification_of(output, labels) for output in outputs]

    def scores(self, outputs: Sequence[RequestOutput], parts: Parts) -> list[ScoreOutput]:
        """Returns scores of outputs, by what score() said of each pair."""
        kind = self.spec_for("score").similarity
        scores = []
        for index, numbers in enumerate(parts):
            own = [outputs[number] for number in numbers]
            results = [result_of(output) for output in own]
            score = floats(results[0])[0] if len(results) == 1 else similarity(kind, results[0], results[1])
            counts = [counts_of(output) for output in own]
            totals = {name: sum(count[name] for count in counts) for name in counts[0]}
            scores.append(ScoreOutput(index=index, score=score, **totals))
        return scores

    def text_ids(self, spec: PoolingSpec, text: Prompt, given: TextOptions) -> tuple[int, ...]:
        """Returns a text, behind its prompt, or token ids as they are, as what can be served."""
        if not isinstance(text, str):
            if given.prompt or given.prompt_name is not None:
                raise RequestError("a prompt is given for token ids; wanted it among them, or a text")
            return self._checked(spec, text[: self._most(given)] if self._cuts(given) else text)
        prompt, tokenizer = self._prompt(spec, given), self.input.tokenizer_for("a text")
        if spec.uses_template:
            system = [{"role": "system", "content": prompt}] if prompt else []
            return self._written(spec, [*system, {"role": "user", "content": text}], given)
        return self._encoded(spec, tokenizer, given, prompt + text)

    def pair_ids(self, spec: PoolingSpec, pair: Any, given: TextOptions) -> tuple[int, ...]:
        """Returns a query and a document as one prompt."""
        query, document = pair
        if not isinstance(query, str) or not isinstance(document, str):
            raise RequestError("query and documents hold token ids; wanted texts: the model joins the two")
        prompt, tokenizer = self._prompt(spec, given), self.input.tokenizer_for("a text")
        if spec.uses_template:
            system = [{"role": "system", "content": prompt}] if prompt else []
            texts = {"query": query, "document": document}
            return self._written(
                spec, [*system, *({"role": r, "content": t} for r, t in texts.items())], given
            )
        return self._encoded(spec, tokenizer, given, prompt + query, document)

    def _of_kind(self, spec: PoolingSpec, given: TextOptions, kinds: Sequence[str]) -> TextOptions:
        """The same with the checkpoint's prompt for texts of a kind, where none is given."""
        name = next((kind for kind in kinds if kind in spec.prompts), None)
        if name is None or given.prompt is not None or given.prompt_name is not None:
            return given
        return replace(given, prompt_name=name)

    def _prepared(
        self, planned: Sequence[Planned], params: PoolingParams, options: RequestOptions
    ) -> Iterator[ParentRequest]:
        return (self.request(each.located_ids(), params, options) for each in planned)

    def request(
        self, token_ids: tuple[int, ...], params: PoolingParams, options: RequestOptions
    ) -> ParentRequest:
        """Returns a request for what is made of token ids that were checked."""
        request_id = self.input.next_id()
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=NO_TOKENS,
            max_total_tokens=len(token_ids) + 1,
            priority=options.priority,
            timeout=options.timeout,
            cache_salt=options.cache_salt,
            pooling=params,
        )
        answer = Answer(request_id=request_id, asked_id=request_id)
        return ParentRequest(
            prompt=None,
            num_wanted=1,
            submissions=(Submission(request, answer),),
        )

    def warming(self) -> ParentRequest:
        """Returns a request for what is made of one token, whatever the task."""
        spec = self.input.pooling
        assert spec is not None
        return self.request((0,), PoolingParams(pooling=spec.pooling), RequestOptions())

    def _prompt(self, spec: PoolingSpec, given: TextOptions) -> str:
        if given.prompt is not None:
            return given.prompt
        name = spec.default_prompt if given.prompt_name is None else given.prompt_name
        if name is None:
            return ""
        if name not in spec.prompts:
            known = ", ".join(map(repr, spec.prompts)) or "none"
            raise RequestError(f"prompt_name is {shown(name)}; the checkpoint's prompts are {known}")
        return spec.prompts[name]

    def _cuts(self, given: TextOptions) -> bool:
        return given.truncate_prompt_tokens is not None

    def _most(self, given: TextOptions) -> int | None:
        """Tokens that are kept of a longer text; None for an error."""
        keep = given.truncate_prompt_tokens
        return self.max_prompt_tokens if keep == ALL_THAT_FIT else keep

    def _encoded(
        self, spec: PoolingSpec, tokenizer: Tokenizer, given: TextOptions, text: str, pair: str | None = None
    ) -> tuple[int, ...]:
        keep, adds = self._most(given), given.add_special_tokens
        if keep is None:
            most = self.max_prompt_tokens
            return self._checked(spec, tokenizer.encode(text, adds, max_tokens=most, pair=pair))
        return self._checked(spec, tokenizer.encode_beginning(text, keep, adds, pair))

    def _written(
        self, spec: PoolingSpec, messages: list[dict[str, str]], given: TextOptions
    ) -> tuple[int, ...]:
        variables = dict(spec.template_kwargs)
        opens = bool(variables.pop("add_generation_prompt", False))
        tokenizer = self.input.tokenizer_for("a text")
        most = self.max_prompt_tokens
        ids = tokenizer.apply_chat_template(
            messages, opens, max_tokens=most, template_kwargs=variables or None
        )
        keep = self._most(given)
        if keep is not None and len(ids) > keep:
            raise UnsupportedError(
                f"truncate_prompt_tokens is {keep}, and this text of {len(ids)} tokens is written "
                "by the model's chat template, whose end cannot be left out; shorten the text"
            )
        return self._checked(spec, ids)

    def _checked(self, spec: PoolingSpec, token_ids: Sequence[int]) -> tuple[int, ...]:
        ids = check_prompt(
            checked_kind(token_ids),
            vocab_size=self.input.vocab_size,
            max_model_len=self.input.max_model_len,
            capacity_tokens=self.input.capacity_tokens,
            declared_len=self.input.declared_len,
            num_new_tokens=0,
        )
        if spec.yields == "classes" and spec.pad_token_id is not None:
            return without_padding(ids, spec.pad_token_id)
        return ids


def without_padding(ids: tuple[int, ...], pad_token_id: int) -> tuple[int, ...]:
    """Returns token ids up to the last that is no padding, at least one: whose state says the class."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_token_id:
        end -= 1
    return ids[:end]


def _listed(name: str, given: Any) -> list[Prompt]:
    try:
        return as_list(given)
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from error
