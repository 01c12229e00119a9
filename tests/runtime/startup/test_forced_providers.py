"""Every provider that a CPU has serves the whole runtime, and gives the tokens that the formulas give."""

import dataclasses

import pytest

from lamina import SamplingParams
from lamina.custom_ops._shared import registry

pytestmark = pytest.mark.timeout(900)  # the first to come builds the kernels
PROMPTS = [[5], list(range(40, 70)), [300, 3] * 20]
COMMON = {"max_tokens": 12, "ignore_eos": True}
WAYS = [
    SamplingParams(temperature=0, **COMMON),
    SamplingParams(temperature=1, top_k=40, top_p=0.9, min_p=0.01, seed=3, **COMMON),
    SamplingParams(temperature=1, repetition_penalty=1.3, typical_p=0.9, seed=4, **COMMON),
]
SETTINGS = {"dtype": "float32", "quantization": "int8"}
OPS = (
    "linear_int8",
    "paged_attention",
    "write_kv_cache",
    "sample",
    "adjust_logits",
    "keep_typical",
)
GEMM_OPS = ("linear", "add_rms_norm_linear")  # of a model in bfloat16


def cases(ops):
    return [(op, name) for op in ops for name in registry.providers(op) if registry.runs_on(op, name, "cpu")]


@pytest.fixture
def count_calls(monkeypatch):
    """count_calls(op, provider) -> a list that is as long as the provider was called often."""

    def forget():
        for cached in (registry._implementation, registry._load, registry._select_auto):
            cached.cache_clear()

    def count(op, name):
        known, calls = registry._find(op).providers, []

        def load():
            call = provider.load()
            return lambda *args, **options: (calls.append(1), call(*args, **options))[1]

        provider = known[name]
        monkeypatch.setitem(known, name, dataclasses.replace(provider, load=load))
        forget()
        return calls

    yield count
    monkeypatch.undo()
    forget()


@pytest.fixture
def serve(open_runtime, compile_cache):
    """serve(forced, ways, **settings) -> the completions of every prompt, alone, in every way."""

    def tell(forced, ways=WAYS, **settings):
        with registry.forced(forced):
            runtime = open_runtime(compile=True, cache_dir=compile_cache, **settings)
            return [runtime.generate([prompt], way)[0].outputs[0] for way in ways for prompt in PROMPTS]

    return tell


def tokens(completions):
    return [list(one.token_ids) for one in completions]


_formulas = []


@pytest.fixture
def formulas(serve):
    """What the formulas of all ops answer."""
    if not _formulas:
        _formulas.append(tokens(serve(dict.fromkeys(OPS, "reference"), **SETTINGS)))
    return _formulas[0]


@pytest.mark.parametrize(("op", "provider"), cases(OPS), ids=str)
def test_tokens_are_those_of_the_formulas(serve, formulas, count_calls, op, provider):
    calls = count_calls(op, provider)
    assert tokens(serve({op: provider}, **SETTINGS)) == formulas
    assert calls


@pytest.mark.parametrize(("op", "provider"), cases(GEMM_OPS), ids=str)
def test_likelihoods_in_bfloat16_are_those_of_the_formulas_but_for_rounding(serve, count_calls, op, provider):
    likeliest = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    expected = serve(dict.fromkeys(GEMM_OPS, "reference"), [likeliest], dtype="bfloat16")
    calls = count_calls(op, provider)
    got = serve({op: provider}, [likeliest], dtype="bfloat16")
    for one, other in zip(got, expected, strict=True):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=0.05)
    assert calls


def test_keys_are_rotated_and_written_in_one_kernel_as_by_the_formula(serve, count_calls):
    """In bfloat16, where a pass puts both together: the kernel rounds where the formula does."""
    calls = count_calls("rotary_and_write_kv_cache", "cpu")
    by_kernel = serve({"rotary_and_write_kv_cache": "cpu"}, dtype="bfloat16")
    assert calls
    by_formula = serve({"rotary_and_write_kv_cache": "reference"}, dtype="bfloat16")
    assert tokens(by_formula) == tokens(by_kernel)
