"""Whatever a request's own logits processors do, they end that request alone, in words."""

import pickle

import pytest
import torch

from lamina import RequestError, SamplingParams
from lamina.runtime.scheduler.prefix_view import PrefixView

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


class Unspeakable(Exception):
    def __repr__(self):
        raise RuntimeError("no words")

    __str__ = __repr__


class Outside(BaseException):
    """Not an Exception."""


class Torn(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("do not touch")


def raising(error):
    def processor(prompt, answer, logits):
        raise error

    return processor


ODD = {
    "an error without words": (raising(Unspeakable()), "raised <.*Unspeakable instance"),
    "an exit": (raising(SystemExit(3)), r"raised SystemExit\(3\)"),
    "the end of a generator": (raising(GeneratorExit()), "raised GeneratorExit"),
    "no Exception at all": (raising(Outside("out")), r"raised Outside\('out'\)"),
    "out of memory": (raising(MemoryError("much")), r"raised MemoryError\('much'\)"),
    "endless words": (raising(ValueError("x" * 10**6)), r"raised ValueError\('x{80,100}\.\.\.x{80,100}'\)$"),
    "coordinates": (lambda p, a, logits: logits.to_sparse(), "torch.sparse_coo"),
    "complex numbers": (lambda p, a, logits: logits.to(torch.complex64), "torch.complex64"),
    "a row": (lambda p, a, logits: logits[None], r"returned \[1, 320\]; wanted a tensor \[320\]"),
    "a tensor without numbers": (lambda p, a, logits: logits.to("meta"), "raised NotImplementedError"),
    "a tensor that resists": (
        lambda p, a, logits: logits.as_subclass(Torn),
        r"raised RuntimeError\('do not touch'\)",
    ),
    "a list": (lambda p, a, logits: logits.tolist(), r"returned \["),
    "an unspeakable thing": (lambda p, a, logits: Unspeakable(), "returned <.*Unspeakable instance"),
}


@pytest.fixture(scope="module")
def runtime(tiny_folder):
    from lamina import Runtime

    with Runtime.from_pretrained(tiny_folder, compile=False) as runtime:
        yield runtime


@pytest.mark.parametrize("kind", ODD)
def test_a_processor_ends_its_own_request_whatever_comes_of_it(runtime, is_idle, kind):
    processor, message = ODD[kind]
    plain, odd = SamplingParams(**GREEDY), SamplingParams(**GREEDY, logits_processors=[processor])
    alone = runtime.generate([[5, 6]], plain)[0].outputs[0].token_ids
    canary = runtime.stream([5, 6], plain)
    received = [next(canary)]
    victim = runtime.stream([7, 8], odd)
    with pytest.raises(RequestError, match=message) as raised:
        list(victim)
    assert str(raised.value).startswith("logits_processors[0] r")
    received += canary
    assert tuple(token for delta in received for token in delta.token_ids) == alone
    is_idle(runtime)


@pytest.mark.parametrize(
    "same",
    [
        lambda logits: logits.double(),
        lambda logits: logits.to(torch.bfloat16).float(),
        lambda logits: logits.clone().requires_grad_(),
        lambda logits: logits.expand(1, -1)[0],
    ],
)
def test_a_processor_may_return_any_tensor_that_holds_its_numbers(runtime, same):
    with torch.inference_mode(False):
        odd = SamplingParams(**GREEDY, logits_processors=[lambda prompt, answer, logits: same(logits)])
    plain = runtime.generate([[5, 6]], SamplingParams(**GREEDY))[0]
    assert runtime.generate([[5, 6]], odd)[0].outputs[0].token_ids == plain.outputs[0].token_ids


def test_an_interrupt_in_a_processor_ends_its_request_and_reaches_whoever_waits(runtime, is_idle):
    plain = SamplingParams(**GREEDY)
    alone = runtime.generate([[5, 6]], plain)[0].outputs[0].token_ids
    canary = runtime.stream([5, 6], plain)
    received = [next(canary)]
    odd = SamplingParams(**GREEDY, logits_processors=[raising(KeyboardInterrupt())])
    victim = runtime.stream([7, 8], odd)
    with pytest.raises(KeyboardInterrupt):
        list(victim)
    received += canary
    assert tuple(token for delta in received for token in delta.token_ids) == alone
    is_idle(runtime)


def test_a_processor_that_calls_its_own_runtime_is_told_that_it_cannot(runtime, is_idle):
    plain = SamplingParams(**GREEDY)
    alone = runtime.generate([[5, 6]], plain)[0].outputs[0].token_ids
    for call in (
        lambda: runtime.generate([[1]], plain),
        lambda: next(runtime.stream([1], plain)),
        runtime.idle,
        runtime.close,
    ):
        canary = runtime.stream([5, 6], plain)
        received = [next(canary)]
        odd = SamplingParams(**GREEDY, logits_processors=[lambda prompt, answer, logits, call=call: call()])
        with pytest.raises(RequestError, match="called from inside one of its own steps"):
            runtime.generate([[7, 8]], odd)
        received += canary
        assert tuple(token for delta in received for token in delta.token_ids) == alone
        is_idle(runtime)


def test_a_processor_may_look_at_the_figures_of_its_runtime(runtime):
    seen = []

    def look(prompt, answer, logits):
        seen.append(runtime.stats()["requests"]["running"])
        return logits

    runtime.generate([[7, 8]], SamplingParams(**GREEDY, logits_processors=[look]))
    assert seen == [1] * 6


def test_processors_read_an_answer_where_its_tokens_lie():
    """A copy a step is quadratic in the answer's length; what a caller has kept stays as it was."""
    tokens = [4, 5, 6]
    view, same = PrefixView(tokens), (4, 5, 6)
    tokens.append(7)
    assert view == same == (*view,)
    assert same == view
    assert hash(view) == hash(same)
    assert (len(view), view[-1], view[0], view[1:], view[::-1]) == (3, 6, 4, (5, 6), (6, 5, 4))
    assert (view.__add__((1,)), view.__radd__((1,))) == ((4, 5, 6, 1), (1, 4, 5, 6))
    assert (7 in view, view.index(6)) == (False, 2)
    assert (repr(view), pickle.loads(pickle.dumps(view))) == (repr(same), same)
    assert torch.tensor(view).tolist() == [4, 5, 6]
    assert view not in ([4, 5, 6], (4, 5), None)
    with pytest.raises(IndexError):
        view[3]


def test_no_step_copies_the_answer_for_a_processor(make_server):
    server = make_server(blocks=20)
    params = {"max_tokens": 8, "logits_processors": [lambda prompt, answer, logits: logits]}
    request = server.add("a", 4, **params)
    for _ in range(3):
        server.step()
    plan = server.scheduler.schedule()
    (history,) = plan.adjusted.histories
    assert history.output_token_ids._tokens is request.output_token_ids
    assert history.output_token_ids == (*request.output_token_ids,)
