"""Two plans of one model: that of steps without adapters, which knows of none, and that of steps with any."""

from pathlib import Path
from typing import Any

import pytest

from lamina.common.errors import ConfigError, UnknownSettingError
from lamina.common.progress import say_nothing
from lamina.compiler.compile import piece_graphs
from lamina.compiler.config import CompileConfig
from lamina.models.adapters.slots import TOKEN_SLOTS
from lamina.runtime.adapters.config import LoRAConfig, parse_lora
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup import memory
from lamina.runtime.startup.loader import resolve_runtime
from lamina.runtime.startup.resolved import ResolvedRuntime

from .conftest import GREEDY, PROMPTS, SMALL, Tuned, tokens


def resolved(folder: Path, **settings: Any) -> ResolvedRuntime:
    given = {**SMALL, "compile": True, **settings}
    return resolve_runtime(RuntimeConfig(model=folder, **given), say_nothing)


def ops_of(one: ResolvedRuntime) -> list[str]:
    return [str(node.target) for graph in piece_graphs(one.program()) for node in graph.nodes]


def test_room_for_adapters_changes_nothing_of_the_plan_without(tiny_folder: Path) -> None:
    plain, roomy = resolved(tiny_folder), resolved(tiny_folder, lora="4:8")
    assert plain.plan_factors() == roomy.plan_factors()
    assert plain.plan_factors() != roomy.adapted().plan_factors()
    assert not any("lora" in op for op in ops_of(roomy))
    assert TOKEN_SLOTS not in roomy.program().parameters


def test_every_projection_of_the_other_plan_reads_the_slots(tiny_folder: Path) -> None:
    ops = ops_of(resolved(tiny_folder, lora="4:8").adapted())
    before, between, after = 1, 4, 3  # of the pieces: before the first attention, between two, after the last
    assert sum("lamina.lora" in op for op in ops) == before + between + after


def test_slots_are_counted_with_the_weights(tiny_folder: Path) -> None:
    plain, roomy = resolved(tiny_folder), resolved(tiny_folder, lora=LoRAConfig(max_loras=3, max_lora_rank=5))
    layout = roomy.slot_layout
    assert layout is not None
    rows, parts = 128 + 64 + 256 + 64, 3 * 64 + 64 + 2 * 64 + 128  # of b; columns of a, part by part
    of_matrices = 2 * 3 * 5 * (parts + rows) * 4  # layers, slots, rank, bytes
    rest = layout.num_bytes(roomy.dtype) - of_matrices
    assert 0 < rest < 40_000  # factors, and the slot of each token of the largest step
    added = memory.weight_bytes(roomy) - memory.weight_bytes(plain)
    assert added == layout.num_bytes(roomy.dtype)


@pytest.mark.long
def test_a_compiled_model_answers_as_the_merged_one(tuned: Tuned, tmp_path: Path) -> None:
    """By captured calls of its kernels, too, in steps of either kind; loading compiles nothing."""
    with tuned.runtime(compile=True, cache_dir=tmp_path) as runtime:
        for _ in range(3):
            for name, number in (("a0", 0), ("a1", 1), (None, None), ("a2", 2)):
                assert tokens(runtime.generate(PROMPTS, GREEDY, adapter=name)) == tuned.answers[number]
        stats = runtime.stats()
        assert stats["cpu_call_graphs"]["replays"] > 20
        assert stats["compile"]["recompiles"] == 0
    captured = CompileConfig(cuda_graphs="on")  # on a CPU their bookkeeping, with padding
    with tuned.runtime(compile=captured, cache_dir=tmp_path, max_num_seqs=8) as runtime:
        for name, number in (("a0", 0), (None, None), ("a2", 2), ("a1", 1), (None, None), ("a2", 2)):
            assert tokens(runtime.generate(PROMPTS, GREEDY, adapter=name)) == tuned.answers[number]
        stats = runtime.stats()
        assert stats["cuda_graphs"]["replays"] > 40
        assert not stats["cuda_graphs"]["eager_steps"]
        assert stats["compile"]["compiled"] == 0


@pytest.mark.parametrize("text, wanted", [("8", (8, 16)), ("8:32", (8, 32)), ("1:1", (1, 1))])
def test_room_is_a_number_of_adapters_and_their_rank(text: str, wanted: tuple[int, int]) -> None:
    lora = RuntimeConfig(model="m", lora=text).lora
    assert isinstance(lora, LoRAConfig)
    assert (lora.max_loras, lora.max_lora_rank) == wanted


@pytest.mark.parametrize(
    "text", ["", "a", "8:", ":8", "8:8:8", "-1", "0", "8:0", "1e3", "9" * 30, "257", "٣"]
)
def test_what_is_no_room_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"lora is|max_loras is|max_lora_rank is"):
        parse_lora(text)


@pytest.mark.parametrize("wrong", [{"max_loras": True}, {"max_lora_rank": 2.5}, {"max_held": 0}])
def test_a_count_that_is_none_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LoRAConfig(**wrong)
    with pytest.raises(UnknownSettingError, match="max_held"):
        LoRAConfig(max_cpu_loras=3)  # type: ignore[call-arg]
