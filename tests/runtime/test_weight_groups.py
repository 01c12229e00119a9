"""Weights that come from elsewhere: by a group that a trainer sends to, and to engines that run apart."""

import asyncio
import contextlib
import os
import socket
import threading

import pytest

from lamina import AsyncRuntime, ConfigError, RequestError, Runtime, SamplingParams, WeightGroup

from .asking import SMALL

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 6, 7], [*range(40, 70)], [7] * 33]
Q = "model.layers.0.self_attn.q_proj.weight"
WRONG = {
    "shape": (lambda given: given | {Q: given[Q][:-1]}, r"q_proj.weight has shape \[63, 64\]"),
    "name": (lambda given: given | {"model.layers.7.x": given[Q]}, "no place for model.layers.7"),
}


def answers(runtime):
    return [output.outputs[0].token_ids for output in runtime.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def right(other_folder):
    """What a runtime of the other weights answers."""
    with Runtime.from_pretrained(other_folder, **SMALL) as runtime:
        return answers(runtime)


def free_port():
    """A port below those that a system gives to whoever asks for any, which may take it before it is used."""
    for port in range(12000 + os.getpid() % 10000, 32000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def beside(function):
    """function() runs in another thread; what it raised, or None, is in the list at the end."""
    raised = []

    def run():
        try:
            function()
            raised.append(None)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield raised
    finally:
        thread.join(120)
        assert not thread.is_alive()


def test_a_group_brings_weights_to_several_runtimes(tiny_folder, other, right):
    group = {"port": free_port(), "world_size": 3, "timeout": 60}
    with (
        Runtime.from_pretrained(tiny_folder, **SMALL) as first,
        Runtime.from_pretrained(tiny_folder, **SMALL) as second,
    ):
        with (
            beside(lambda: first.update_weights(WeightGroup(**group, rank=1))) as one,
            beside(lambda: second.update_weights(WeightGroup(**group, rank=2))) as two,
        ):
            WeightGroup(**group, rank=0).send(other)
        assert one + two == [None, None]
        assert answers(first) == answers(second) == right


@pytest.mark.parametrize("case", WRONG)
def test_a_receiver_that_refuses_is_sent_nothing(tiny_folder, other, case):
    make, words = WRONG[case]
    group = {"port": free_port(), "world_size": 2, "timeout": 60}
    with Runtime.from_pretrained(tiny_folder, **SMALL) as runtime:
        before = answers(runtime)
        sending, refused = WeightGroup(**group, rank=0), "another process of the group refused"
        with (
            beside(lambda: runtime.update_weights(WeightGroup(**group, rank=1))) as raised,
            pytest.raises(RequestError, match=refused),
        ):
            sending.send(make(other))
        with pytest.raises(RequestError, match=words):
            raise raised[0]
        assert answers(runtime) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 0),
        ("rank", 2),
        ("rank", -1),
        ("world_size", 1),
        ("backend", "mpi"),
        ("timeout", 0),
        ("host", 5),
    ],
)
def test_a_group_that_cannot_be_is_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        WeightGroup(**{"port": 5000, "world_size": 2, "rank": 1} | {field: value})


def test_a_runtime_does_not_send(tiny_folder):
    with (
        Runtime.from_pretrained(tiny_folder, **SMALL) as runtime,
        pytest.raises(RequestError, match="rank is 0"),
    ):
        runtime.update_weights(WeightGroup(port=5000, world_size=2, rank=0))
    with pytest.raises(RequestError, match="rank is 1"):
        WeightGroup(port=5000, world_size=2, rank=1).send({})


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_an_async_runtime_is_given_weights_in_every_way(tiny_folder, other, right, engine):
    async def program():
        async with await AsyncRuntime.from_pretrained(tiny_folder, engine=engine, **SMALL) as runtime:

            async def tokens():
                return [(await runtime.generate(p, GREEDY).output()).outputs[0].token_ids for p in PROMPTS]

            before, fingerprint = await tokens(), await runtime.call("fingerprint")
            await runtime.update_weights(other)
            after = await tokens()
            assert after == right
            assert await runtime.call("fingerprint") != fingerprint
            await runtime.update_weights(tiny_folder)
            assert await tokens() == before
            assert await runtime.call("fingerprint") == fingerprint
            group = {"port": free_port(), "world_size": 2, "timeout": 60}
            sending = asyncio.to_thread(WeightGroup(**group, rank=0).send, other)
            await asyncio.gather(runtime.update_weights(WeightGroup(**group, rank=1)), sending)
            assert await tokens() == right
            with pytest.raises(RequestError, match="has shape"):
                await runtime.update_weights(WRONG["shape"][0](other))
            with pytest.raises(RequestError, match="wanted tensors by name"):
                await runtime.update_weights(5)
            assert await tokens() == right

    asyncio.run(program())
