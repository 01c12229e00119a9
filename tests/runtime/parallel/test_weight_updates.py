"""Weights of several ranks replaced while they live: each takes its part, and all take them or none."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from lamina import ConfigError, LoadError, RequestError, Runtime, SamplingParams, UnsupportedError
from lamina.custom_ops.all_reduce.group import Group
from lamina.runtime.parallel import ParallelConfig
from lamina.runtime.weight_group import WeightGroup
from lamina.runtime.weight_messages import hand_over
from lamina.runtime.worker import model_weights

from ...families import FAMILIES
from ...ranks import as_threads

PROMPTS = [[5, 9, 301], [7] * 11 + [44, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, logprobs=5)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "compile": False, "num_kv_blocks": 32}


def answers(runtime: Runtime) -> Any:
    """Tokens, and the bits of what they were chosen by."""
    found = [output.outputs[0] for output in runtime.generate(PROMPTS, GREEDY)]
    return [(one.token_ids, [{i: p.logprob for i, p in at.items()} for at in one.logprobs]) for one in found]


def folders(name: str, tmp_path: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    """Two checkpoints of a family, and the tensors of the second."""
    first, second = (FAMILIES[name].save(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    return first, second, load_file(second / "model.safetensors")


def fresh(folder: Path, ranks: int, **settings: Any) -> Any:
    """What a new runtime answers, on rank 0."""

    def work(group: Group) -> Any:
        with Runtime.from_pretrained(folder, tensor_parallel=ranks, **SETTINGS, **settings) as runtime:
            return answers(runtime)

    return as_threads(ranks, work)[0]


@pytest.mark.parametrize(
    "name, ranks, quantization",
    [
        ("mistral-full", 2, None),  # a vocabulary that two do not divide
        ("qwen3-tied", 4, "int8"),  # tied embeddings, biases, keys and values that two ranks have alike
        ("phi3", 2, "int8"),  # projections that are fused in the checkpoint
    ],
)
def test_tensors_folders_and_sleep_give_what_a_new_runtime_gives(
    name: str, ranks: int, quantization: str | None, tmp_path: Path
) -> None:
    first, second, tensors = folders(name, tmp_path)
    before, right = (fresh(one, ranks, quantization=quantization) for one in (first, second))
    assert before != right
    settings = {**SETTINGS, "quantization": quantization, "tensor_parallel": ranks}

    def work(group: Group) -> list[Any]:
        with Runtime.from_pretrained(first, **settings) as runtime:
            found = [answers(runtime)]
            runtime.update_weights(tensors)
            found.append(answers(runtime))
            runtime.update_weights(first)
            found.append(answers(runtime))
            runtime.sleep(level=2)
            runtime.wake()
            found.append(answers(runtime))
            runtime.sleep(level=2)
            runtime.update_weights(tensors)
            runtime.wake()
            found.append(answers(runtime))
        return found

    for found in as_threads(ranks, work):
        assert found == [before, right, before, before, right]


def test_some_tensors_leave_the_others_as_they_are(tmp_path: Path) -> None:
    first, second, tensors = folders("mistral-full", tmp_path)
    rest = {key: one for key, one in tensors.items() if "layers.1." in key and "down_proj" in key}
    half = {key: one for key, one in tensors.items() if key not in rest}
    right = fresh(second, 2)

    def work(group: Group) -> Any:
        with Runtime.from_pretrained(first, tensor_parallel=2, **SETTINGS) as runtime:
            runtime.update_weights(rest)
            assert answers(runtime) != right
            runtime.update_weights(half)
            return answers(runtime)

    assert as_threads(2, work) == [right, right]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_trainer_sends_to_every_rank(tmp_path: Path) -> None:
    first, second, tensors = folders("qwen2", tmp_path)
    right = fresh(second, 2)
    group = {"port": free_port(), "world_size": 3, "timeout": 120}
    sender = threading.Thread(target=WeightGroup(**group, rank=0).send, args=(tensors,))

    def work(rank: Group) -> Any:
        with Runtime.from_pretrained(first, tensor_parallel=2, **SETTINGS) as runtime:
            with pytest.raises(ConfigError, match="world_size is 3; wanted at least 4, since each"):
                runtime.update_weights(WeightGroup(**group, rank=2))
            with pytest.raises(RequestError, match="rank is 0, which sends"):
                runtime.update_weights(WeightGroup(**group, rank=0))
            runtime.update_weights(WeightGroup(**group, rank=1))
            return answers(runtime)

    sender.start()
    try:
        assert as_threads(2, work) == [right, right]
    finally:
        sender.join(240)
    assert not sender.is_alive()


def test_what_fails_on_one_rank_changes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, tensors = folders("qwen2", tmp_path)
    before, right = fresh(first, 2), fresh(second, 2)
    write, is_broken = model_weights.write, threading.Event()

    def faulty(weights: Any, slots: Any, given: Any) -> None:
        write(weights, slots, given)
        if weights.rank == 1 and is_broken.is_set():
            raise LoadError("only here")

    monkeypatch.setattr(model_weights, "write", faulty)
    name = next(key for key in tensors if "q_proj.weight" in key)

    def work(rank: Group) -> Any:
        with Runtime.from_pretrained(first, tensor_parallel=2, **SETTINGS) as runtime:
            with pytest.raises(RequestError, match=r"q_proj\.weight has shape"):
                runtime.update_weights({name: tensors[name][:-1]})
            with pytest.raises(LoadError, match="only here") as caught:
                runtime.update_weights(tensors)
            assert ("rank 1 could not take" in str(caught.value)) == (rank.rank == 0)
            assert not runtime.is_sleeping
            assert answers(runtime) == before
            rank.barrier()
            is_broken.clear()
            rank.barrier()
            runtime.update_weights(tensors)
            return answers(runtime)

    is_broken.set()
    assert as_threads(2, work) == [right, right]


def test_tensors_are_not_sent_to_other_machines(tmp_path: Path) -> None:
    _, _, tensors = folders("qwen2", tmp_path)
    parallel, given = ParallelConfig(executor="ray"), []
    with pytest.raises(UnsupportedError, match="weights are tensors and executor is 'ray'"):
        hand_over(lambda kind, value: given.append(kind), tensors, parallel)
    hand_over(lambda kind, value: given.append(kind), str(tmp_path), parallel)
    assert given == ["folder"]


def test_ranks_in_processes_of_their_own_are_given_tensors(tmp_path: Path) -> None:
    first, second, tensors = folders("qwen2", tmp_path)
    settings = {**SETTINGS, "tensor_parallel": 2}
    right = fresh(second, 2)
    with Runtime.from_pretrained(first, **settings) as runtime:
        runtime.update_weights(tensors)
        assert answers(runtime) == right
        runtime.sleep(level=2)
        runtime.update_weights(second)
        runtime.wake()
        assert answers(runtime) == right
