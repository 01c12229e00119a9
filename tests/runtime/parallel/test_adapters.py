"""Adapters of a model that ranks share out: what one process answers with them, and with merged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import LoadError, RequestError, Runtime, SamplingParams
from lamina.custom_ops.all_reduce.group import Group
from lamina.runtime.adapters.config import LoRAConfig

from ...adapters import ALL_MODULES, write_adapter, write_merged
from ...families import FAMILIES
from ...ranks import as_threads

PROMPTS = [[5, 9, 301], [7] * 11 + [44, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "compile": False, "num_kv_blocks": 64}
ROOM = LoRAConfig(max_loras=2, max_lora_rank=8)
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def answers(folder: Path, adapters: tuple[Path, ...], **settings: Any) -> list[Any]:
    """Of the model alone and with each adapter: tokens, and the logits that they were sampled from."""
    found = []
    with Runtime.from_pretrained(folder, lora=ROOM if adapters else None, **SETTINGS, **settings) as runtime:
        for number, adapter in enumerate(adapters):
            runtime.load_adapter(str(number), adapter)
        for name in (None, *map(str, range(len(adapters)))):
            seen: list[torch.Tensor] = []
            runtime._loaded.runner.on_logits = lambda plan, logits, seen=seen: seen.append(logits.clone())
            outputs = runtime.generate(PROMPTS, GREEDY, adapter=name)
            found.append(([one.outputs[0].token_ids for one in outputs], torch.cat(seen)))
    return found


@pytest.mark.parametrize(
    "name, ranks, modules",
    [
        ("qwen2", 2, ALL_MODULES),  # biases of query, key and value
        ("mistral-full", 4, ALL_MODULES),  # keys and values that two ranks have alike
        ("phi3", 2, FUSED),  # projections that are fused in the checkpoint
        ("granite", 2, ["v_proj", "down_proj"]),  # of fused projections one part alone
    ],
)
def test_logits_are_those_of_one_process_and_of_merged_weights(
    name: str, ranks: int, modules: list[str], tmp_path: Path
) -> None:
    folder = FAMILIES[name].save(tmp_path / "model")
    made = {"target_modules": modules}
    adapters = tuple(write_adapter(folder, tmp_path / str(r), seed=r, r=r, **made) for r in (2, 5))
    (alone, *adapted), (merged,) = (
        answers(folder, adapters),
        answers(write_merged(folder, adapters[1], tmp_path / "merged"), ()),
    )
    torch.testing.assert_close(adapted[1][1], merged[1], rtol=1e-4, atol=1e-4)  # PEFT merges in float32
    assert not torch.allclose(alone[1], adapted[0][1], rtol=0.1)

    def work(group: Group) -> list[Any]:
        return answers(folder, adapters, tensor_parallel=ranks)

    every_rank = as_threads(ranks, work)
    for found in every_rank:
        for (tokens, logits), (own_tokens, own_logits), first in zip(
            [alone, *adapted], found, every_rank[0], strict=True
        ):
            assert own_tokens == tokens
            torch.testing.assert_close(own_logits, logits, rtol=1e-10, atol=1e-10)
            assert torch.equal(own_logits, first[1])


def test_workers_in_processes_of_their_own_have_adapters(tmp_path: Path) -> None:
    folder = FAMILIES["qwen2"].save(tmp_path / "model")
    adapter = write_adapter(folder, tmp_path / "adapter", seed=1)
    wanted = [tokens for tokens, _ in answers(folder, (adapter,))]
    assert wanted[0] != wanted[1]
    with Runtime.from_pretrained(folder, lora=ROOM, tensor_parallel=2, **SETTINGS) as runtime:
        with pytest.raises(LoadError, match="is no folder"):
            runtime.load_adapter("none", tmp_path / "none")
        runtime.load_adapter("0", adapter)
        found = [[one.outputs[0].token_ids for one in runtime.generate(PROMPTS, GREEDY)]]
        found += [[one.outputs[0].token_ids for one in runtime.generate(PROMPTS, GREEDY, adapter="0")]]
        assert found == wanted
        (adapter / "adapter_model.safetensors").unlink()
        assert [one.outputs[0].token_ids for one in runtime.generate(PROMPTS, GREEDY, adapter="0")] == wanted[
            1
        ]
        runtime.unload_adapter("0")
        with pytest.raises(RequestError, match="adapter"):
            runtime.generate(PROMPTS, GREEDY, adapter="0")
