"""Whatever values a call is given, it is refused by name or served, and a stream beside it never notices."""

import collections
import contextlib
import dataclasses
import itertools
import math
import random
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import settings

from lamina import (
    BeamSearchParams,
    LogitsError,
    ProcessorError,
    RequestError,
    Runtime,
    SamplingParams,
    StructuredOutputs,
)
from lamina.runtime.request_options import RequestOptions

PER_EXAMPLE = 20  # combinations for each example of the profile: 20,000 with `prove`
MOST_SAID = 600  # characters of a refusal
POOL = {"max_model_len": 64, "block_size": 4, "num_kv_blocks": 60, "max_num_seqs": 6}
CANARY = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, logprobs=1)


class Odd:
    """Fails whatever is asked of it."""

    def fail(self, *_):
        raise KeyError("odd")

    __repr__ = __str__ = __iter__ = __len__ = __index__ = __float__ = __bool__ = __eq__ = __getitem__ = fail
    __hash__ = None


class Text(str):
    """A string with an opinion of its own."""

    __slots__ = ()

    def encode(self, *_):
        raise RuntimeError("not me")


class Fresh:
    """An iterator made anew for each call."""

    def __init__(self, make):
        self.make = make


def raising():
    yield 1
    raise OSError("in the middle")


HUGE = "x" * 60_000
ANYTHING = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 10**5000),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 1e-320, 1e38, 3.5e38, 1e308, math.nan, math.inf, -math.inf, 3 + 4j),
    *("", "x", "\ud800", "a\udfffb", "\0", HUGE, Text("x"), b"x", bytearray(b"1"), "5", "é☃𝄞"),
    *([], (), {}, set(), [None], ["x", 5], [[]], [[1]], [-1], [5, 2**31], [319], [320]),
    *(range(5), range(10**12)),
    *({5: 1.0}, {"7": -100}, {True: 1}, {5: math.nan}, {2**40: 1}, {"9" * 5000: 1}, {5: None}),
    *(["x"] * 60_000, [[5]] * 5000, [[5] * 5000], [HUGE] * 3, ["a\ud800"], [""], list(range(320))),
    *(torch.tensor(3), torch.tensor(0.5), torch.tensor(True), torch.tensor([1, 2]), torch.tensor(math.nan)),
    *(torch.zeros(0), torch.tensor(3, device="meta"), np.int64(3), np.float32(0.5), np.bool_(True)),
    *(np.array(3), np.array([1, 2]), np.array([["x"]]), np.float64(math.inf), np.str_("x")),
    *(Fraction(1, 2), Decimal("0.5"), Decimal("NaN"), object(), Odd(), int, len, lambda *_: 5),
    *(Fresh(lambda: iter([1, 2])), Fresh(itertools.count), Fresh(raising)),
]
FITTING = {
    "n": [1, 2, 3],
    "best_of": [1, 3, 4],
    "logprobs": [0, 2, 320],
    "prompt_logprobs": [0, 3],
    "max_tokens": [1, 2, 5, 10**9],
    "min_tokens": [0, 1, 3, 10**9],
    "temperature": [0, 1e-40, 0.7, 3e38],
    "top_k": [-1, 0, 1, 5, 2**31 - 1],
    "top_p": [1e-300, 0.5, 1 - 1e-12, 1],
    "min_p": [0, 1e-300, 0.5, 1],
    "typical_p": [1e-300, 0.5, 1],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 0, 2],
    "repetition_penalty": [1e-30, 1, 1.3, 1e30],
    "logit_bias": [{}, {5: 100, 319: -100}, dict.fromkeys(range(320), 1.0)],
    "allowed_token_ids": [[5], range(320), np.arange(9), [3, 3, 4]],
    "bad_words": [["a"], [[5]], [[5, 6, 7], "the", [8]], [[1] * 64]],
    "logits_processors": [[lambda p, a, x: x * 2], [lambda p, a, x: x.sum()], [Odd], [lambda p, a, x: 1 / 0]],
    "structured_outputs": [StructuredOutputs(choice=["a", "b"]), {"regex": "[ab]+"}],
    "seed": [-(2**63), 0, 2**63 - 1],
    "stop": ["a", ["the", "zz"], "a" * 60_000, ["\0", "é"], [chr(97 + i) * 9 for i in range(26)]],
    "stop_token_ids": [[5], range(320), list(range(200)) * 20],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "detokenize": [True, False],
    "beam_width": [1, 2, 5],
    "length_penalty": [0, 1, 10],
    "priority": [-(2**31), 0, 2**31],
    "timeout": [5e-324, 1e-9, 1000, 1e308],
    "cache_salt": ["", "me", "é" * 60_000, "\0"],
    "adapter": [None, "nobody", "", "é" * 60_000, "\0"],
}
PROMPTS = [
    *("hello", "the " * 9, "é☃", "", " ", "a\ud800", "x" * 200_000, "ab \n" * 100_000, Text("hello")),
    *([5, 6, 7], [0], [319], list(range(30)), list(range(63)), list(range(64)), [320], [2**40], [10**5000]),
    *(np.array([1, 2]), torch.tensor([1, 2]), [torch.tensor(5), np.int32(6)], [True], [1.0], [Odd()]),
    *((), [[]], [[1], "a"], [["x"]], range(10**12), range(2**70), None, 5, b"x", Odd()),
    *([HUGE], {"prompt": "a"}),
]
USER = {"role": "user", "content": "hello"}
MESSAGES = [
    *([USER], [USER, {"role": "assistant", "content": "the"}, USER], [], None, "hello", USER, [{}], [5]),
    *([{"role": "user"}], [{"role": 5, "content": 5}], [{"role": "user", "content": None}], [USER] * 300),
    *([{"role": "user", "content": text}] for text in ("\ud800", "x" * 200_000, "", b"x", ["x"], Odd())),
    *([USER | {"tool_calls": []}], [USER | {"name": "\ud800"}], [Odd()], Odd(), [{"role": "\ud800"}]),
]
TOOLS = [None, [], [{}], [{"type": "function", "function": {"name": "f"}}], "x", 5, [{"x": "\ud800"}], Odd()]

CHATS = {
    "tools": TOOLS,
    "template_kwargs": [None, {}, {"x": False}, {"messages": 5}, {5: 1}, {"x": "\ud800"}, 5, "x", Odd()],
    "continue_final_message": [True, False, None, 1, "x", Odd()],
    "chat_template": [
        None,
        "",
        "x",
        "{{ messages[0].content }}",
        "{{",
        "\ud800",
        5,
        HUGE,
        "{{ 1 / 0 }}",
        Odd(),
    ],
}


class Canary:
    """A stream beside everything else, begun again whenever it ends."""

    def __init__(self, runtime):
        self.runtime, self.count = runtime, 0
        self.right = self.tokens(runtime.stream([9, 8, 7], CANARY))
        self.begin()

    def tokens(self, stream):
        return [(delta.token_ids, delta.text) for delta in stream]

    def begin(self):
        self.stream, self.told = self.runtime.stream([9, 8, 7], CANARY), []

    def step(self):
        """A token more, which is the one that comes when it is alone."""
        for delta in itertools.islice(self.stream, 1):
            self.told.append((delta.token_ids, delta.text))
            assert self.told == self.right[: len(self.told)], "the stream beside noticed"
            return
        assert self.told == self.right, "the stream beside ended otherwise"
        self.count += 1
        self.begin()


@pytest.fixture(scope="module")
def runtime(tiny_text_folder):
    with Runtime.from_pretrained(tiny_text_folder, compile=False, **POOL) as runtime:
        yield runtime


def fields_of(kind):
    return [field.name for field in dataclasses.fields(kind)]


def drawn(chance, names, most):
    """Some fields with values, half of them such as fit."""
    chosen = chance.sample(names, chance.randint(0, most))
    values = {name: chance.choice(FITTING[name] if chance.random() < 0.6 else ANYTHING) for name in chosen}
    return {name: value.make() if isinstance(value, Fresh) else value for name, value in values.items()}


def call_at_random(runtime, chance):
    """Fields that were given, and a call with them."""
    ways = ["generate", "generate", "stream", "beam_search", "chat", "stream_chat"]
    way = chance.choice(ways)
    kind = BeamSearchParams if way == "beam_search" else SamplingParams
    params, options = drawn(chance, fields_of(kind), 4), drawn(chance, fields_of(RequestOptions), 1)
    is_chat = "chat" in way
    pool, usual = (MESSAGES, MESSAGES[0]) if is_chat else (PROMPTS, chance.choice([[5, 6, 7], "hello"]))
    asked = chance.choice(pool) if chance.random() < 0.3 else usual
    given = {"max_tokens": 3} | params
    chosen = chance.sample(list(CHATS), 1) if is_chat and chance.random() < 0.5 else []
    extra = {name: chance.choice(CHATS[name]) for name in chosen}

    def call():
        if way == "stream" and chance.random() < 0.2:
            next(runtime.stream(asked, kind(**given), **options), None)  # and dropped
            return
        found = getattr(runtime, way)(asked, kind(**given), **options, **extra)
        for answer in found if isinstance(found, list) or "stream" in way else [found]:
            for output in getattr(answer, "outputs", [answer]):
                assert output.finish_reason in (None, "stop", "length", "abort")

    return {*given, *options, *extra, "prompt", "message"}, call


def outcome_of(names, call):
    """How a call ends: anything but these is a fault."""
    try:
        call()
    except (ProcessorError, LogitsError) as error:  # LogitsError: of a request that excludes every token
        found, said = "ended with an error", str(error)
    except RequestError as error:
        found, said = "refused", str(error)
    else:
        return "served"
    assert len(said) <= MOST_SAID, f"{len(said)} characters: {said[:200]}"
    assert found != "refused" or any(name in said for name in names), f"{names} are not named: {said}"
    return found


@pytest.mark.timeout(7200)
def test_no_combination_of_values_harms_the_stream_beside_it(runtime, is_idle, record_property, request):
    seed = request.config.getoption("--hypothesis-seed") or 1  # of each share of the examples another
    chance, canary = random.Random(str(seed)), Canary(runtime)
    outcomes = collections.Counter()
    num = PER_EXAMPLE * settings().max_examples
    for number in range(num):
        canary.step()
        names, call = call_at_random(runtime, chance)
        state = f"combination {number}: {sorted(names)}"
        with context(state):
            outcomes[outcome_of(names, call)] += 1
        canary.step()
        if number % 500 == 499:
            while canary.told:
                canary.step()
            is_idle(runtime)
    while canary.told:
        canary.step()
    del canary.stream
    is_idle(runtime)
    outcomes["canaries"] = canary.count
    record_property("outcomes", dict(outcomes))
    print(f"{num} combinations: {dict(outcomes)}")
    assert min(outcomes["refused"], outcomes["served"]) > num / 8


@contextlib.contextmanager
def context(state):
    try:
        yield
    except BaseException as error:
        error.add_note(state)
        raise
