"""Bodies of requests for vectors, classes and scores of texts, and what they are answered."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...common.errors import RequestError
from ...runtime.engine.pooling_processor import TextOptions
from ...runtime.request_options import RequestOptions
from ..config import ServeConfig
from .decoding import Body, Unserved, wrong
from .generation import NonNegative, Positive, named_error
from .response_models import ResponseModel
from .unserved import ACCEPTED
from .usage import Usage

Texts = str | list[str | int | list[NonNegative]]
NO_MESSAGES = Unserved(why="texts are written by the checkpoint's own template; name them with input")
NO_KIND = Unserved(why="name a prompt of the checkpoint with prompt_name")
NO_CUT = Unserved(why="name it with truncate_prompt_tokens")
ONE_TEXT = Unserved(why="a document is one text; leave it out")


class PoolingRequest(Body, kw_only=True, frozen=True):
    """What requests for vectors, classes and scores have in common: how texts become token ids."""

    accepted: ClassVar[frozenset[str]] = ACCEPTED

    prompt_name: str | None = None
    """Of the checkpoint's prompts, which each text begins with; otherwise its default, if it has one."""
    prompt: str | None = None
    """What each text begins with, in place of those."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """So many first tokens of a text are kept, -1 for as many as fit; otherwise a longer one is an error."""
    add_special_tokens: bool = True
    """Whether a text gets the tokenizer's special tokens."""
    priority: int = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,128}(?!\n)$")] | None = None

    def text_options(self) -> TextOptions:
        """Returns how texts become token ids; ApiError names the field that is wrong."""
        names = ("prompt_name", "prompt", "truncate_prompt_tokens", "add_special_tokens")
        try:
            return TextOptions(**{name: getattr(self, name) for name in names})
        except RequestError as error:
            raise named_error(error) from None

    def options(self, *, floor: int | None = None, timeout: float | None = None) -> RequestOptions:
        """Returns how the request is served; arguments as of GenerationRequest.options()."""
        priority = self.priority if floor is None else max(floor, self.priority)
        try:
            return RequestOptions(priority=priority, timeout=timeout, cache_salt=self.cache_salt or "")
        except RequestError as error:
            raise named_error(error) from None


class EmbeddingRequest(PoolingRequest, kw_only=True, frozen=True):
    """A request for /v1/embeddings."""

    unserved: ClassVar[Mapping[str, Unserved]] = {"messages": NO_MESSAGES, "input_type": NO_KIND}
    large: ClassVar[frozenset[str]] = frozenset({"input"})

    input: Texts
    """Texts, or token ids of them, one or many."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64 is of float32, the lowest byte first, and exact."""
    dimensions: Positive | None = None
    """The first so many numbers of each vector, for models that were trained to be cut."""
    normalize: bool | None = None
    """Whether vectors have the length 1; otherwise as the checkpoint says."""


class ClassificationRequest(PoolingRequest, kw_only=True, frozen=True):
    """A request for /classify."""

    unserved: ClassVar[Mapping[str, Unserved]] = {"messages": NO_MESSAGES}
    large: ClassVar[frozenset[str]] = frozenset({"input"})

    input: Texts
    """Texts, or token ids of them, one or many."""
    activation: bool = True
    """Whether probabilities are returned, or logits."""


class ScoreRequest(PoolingRequest, kw_only=True, frozen=True):
    """A request for /v1/score: text_1 and text_2 as vLLM calls them, or queries and documents."""

    large: ClassVar[frozenset[str]] = frozenset({"text_1", "text_2", "queries", "documents"})

    text_1: str | list[str] | None = None
    """One query, or as many as there are documents."""
    text_2: str | list[str] | None = None
    """The documents."""
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    activation: bool = True
    """Whether a score that a model makes itself is squashed as its checkpoint says, or its logit."""

    def pairs(self) -> tuple[list[str], list[str]]:
        """Returns queries and documents; ApiError where they are not given once each."""
        return (
            _listed("text_1", _one_of(self, "text_1", "queries")),
            _listed("text_2", _one_of(self, "text_2", "documents")),
        )


class Document(msgspec.Struct, kw_only=True, frozen=True):
    """A document as Cohere's and Jina's clients may write it."""

    text: str


class RerankRequest(PoolingRequest, kw_only=True, frozen=True):
    """A request for /v1/rerank, as Cohere's and Jina's clients write it."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "max_tokens_per_doc": NO_CUT,
        "max_chunks_per_doc": NO_CUT,
        "rank_fields": ONE_TEXT,
        "return_embeddings": ONE_TEXT,
    }
    large: ClassVar[frozenset[str]] = frozenset({"query", "documents"})

    query: str
    documents: list[str | Document]
    top_n: Positive | None = None
    """The best so many are returned; otherwise all."""
    return_documents: bool = True
    """Whether each result has its document's text."""
    activation: bool = True

    def texts(self) -> list[str]:
        """Returns the documents' texts; ApiError where there are none."""
        if not self.documents:
            raise wrong("documents", "documents is empty; wanted at least one text")
        return [each if isinstance(each, str) else each.text for each in self.documents]


class Embedding(ResponseModel, kw_only=True):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """A list, or float32 in base64."""


class Embeddings(ResponseModel, kw_only=True):
    """The vectors of all texts, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class ClassesOfText(ResponseModel, kw_only=True):
    """The classes of one text."""

    index: int
    label: str
    """Of the likeliest."""
    probs: list[float]
    num_classes: int


class Classifications(ResponseModel, kw_only=True):
    """The classes of all texts, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassesOfText]
    usage: Usage


class Score(ResponseModel, kw_only=True):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class Scores(ResponseModel, kw_only=True):
    """The scores of all pairs, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RankedDocument(ResponseModel, kw_only=True):
    """The text of a document."""

    text: str


class Ranked(ResponseModel, kw_only=True):
    """One document and its score."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(ResponseModel, kw_only=True):
    """Documents, the best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage


def texts_of(given: Texts, config: ServeConfig, where: str = "input") -> list[str | list[int]]:
    """Returns texts or token ids, one or many, each for itself; ApiError for none, and for too many."""
    if isinstance(given, str):
        return [given]
    kinds = {type(each) for each in given}
    if kinds == {int}:
        return [list(given)]  # type: ignore[arg-type]
    if not kinds or len(kinds) > 1:
        got = "empty" if not kinds else "a list of different kinds"
        raise wrong(where, f"{where} is {got}; wanted a text, token ids, or a list of either")
    check_number(where, given, config)
    return list(given)  # type: ignore[arg-type]


def check_number(where: str, given: Sequence[Any], config: ServeConfig) -> None:
    """Raises ApiError for more texts than a request may have."""
    if len(given) > config.max_prompts:
        raise wrong(where, f"{where} holds {len(given)} texts; wanted at most {config.max_prompts}")


def _one_of(request: ScoreRequest, *names: str) -> Any:
    given = [(name, getattr(request, name)) for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise wrong(names[0], f"{' and '.join(names)}: wanted one of the two")
    return given[0][1]


def _listed(where: str, given: str | list[str]) -> list[str]:
    if not given:
        raise wrong(where, f"{where} is empty; wanted at least one text")
    return [given] if isinstance(given, str) else given
