"""Strategies for what crosses between a core and its client, and a form of it that can be compared."""

import dataclasses

from hypothesis import strategies as st

from lamina import EngineError, LaminaError, SamplingParams
from lamina.common.errors import LogitsError, ProcessorError
from lamina.runtime.protocol.engine_output import EngineOutput, Finish, Timeline
from lamina.runtime.protocol.engine_request import EngineRequest
from lamina.runtime.protocol.scheduler_output import TokenLogprobs

IDS = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TIMES = st.none() | st.floats(0, 1e9)


@st.composite
def params(draw):
    """Resolved parameters of any kind that can travel: logits processors are a caller's own code."""
    given = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "n": st.integers(1, 4),
                "logprobs": st.none() | st.integers(0, 20),
                "prompt_logprobs": st.none() | st.integers(0, 20),
                "max_tokens": st.none() | st.integers(1, 2**31 - 1),
                "temperature": st.none() | st.floats(0, 10),
                "top_p": st.floats(0.1, 1),
                "repetition_penalty": st.floats(0.5, 2),
                "logit_bias": st.dictionaries(IDS, st.floats(-100, 100), max_size=4),
                "allowed_token_ids": st.lists(IDS, min_size=1, max_size=4),
                "bad_words": st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=3),
                "stop": st.lists(TEXT.filter(bool), max_size=3),
                "stop_token_ids": st.lists(IDS, max_size=3),
                "ignore_eos": st.booleans(),
                "detokenize": st.none() | st.booleans(),
            },
        )
    )
    return SamplingParams(**given).resolve(None, seed=draw(st.integers(-(2**63), 2**63 - 1)))


REQUESTS = st.builds(
    EngineRequest,
    request_id=TEXT,
    prompt_token_ids=st.lists(IDS, min_size=1, max_size=8).map(tuple),
    params=params(),
    stop_token_ids=st.frozensets(IDS, max_size=4),
    max_total_tokens=st.integers(1, 2**40),
    priority=st.integers(-(2**31), 2**31),
    timeout=st.none() | st.floats(1e-9, 1e9),
    cache_salt=TEXT,
    is_counted=st.booleans(),
    wants_each_token=st.booleans(),
)
REPORTS = st.lists(
    st.builds(
        TokenLogprobs,
        token_ids=st.lists(IDS, min_size=1, max_size=3).map(tuple),
        logprobs=st.lists(st.floats(-9999, 0), min_size=1, max_size=3).map(tuple),
        rank=st.integers(1, 2**31),
    ),
    max_size=4,
).map(tuple)
ERRORS = st.one_of(
    st.none(),
    st.builds(EngineError, TEXT),
    st.builds(LogitsError, TEXT),
    st.builds(ProcessorError, TEXT, TEXT),
)
FINISHES = st.builds(
    Finish,
    reason=st.sampled_from(["stop", "length", "abort"]),
    stop_reason=st.none() | IDS | TEXT,
    times=st.builds(Timeline, queued=TIMES, first_scheduled=TIMES, first_token=TIMES, finished=TIMES),
    num_cached_tokens=st.integers(0, 2**31),
    num_preemptions=st.integers(0, 2**31),
    error=ERRORS,
)
OUTPUTS = st.builds(
    EngineOutput,
    request_id=TEXT,
    num_before=st.integers(0, 2**31),
    new_token_ids=st.lists(IDS, max_size=4).map(tuple),
    logprobs=REPORTS,
    prompt_logprobs=REPORTS,
    finish=st.none() | FINISHES,
)


def plain(value):
    """A value as nothing but built-in types; errors by their class, words and attributes."""
    if isinstance(value, LaminaError):
        return type(value).__name__, value.args, value.__dict__
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value).__name__, {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return type(value).__name__, [plain(each) for each in value]
    assert type(value) in (int, float, bool, str, bytes, list, dict, frozenset, type(None)), value
    return value
