"""What commands say and do of a model over ranks, where no other rank runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lamina import ConfigError, UnsupportedError
from lamina.cli import app
from lamina.common.progress import say_nothing
from lamina.compiler import cache
from lamina.custom_ops.all_reduce.group import Group, group_of_thread
from lamina.custom_ops.all_reduce.thread_group import ThreadGroup
from lamina.runtime.batch_invariance import check_batch_invariance
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.runtime import Runtime
from lamina.runtime.startup import memory
from lamina.runtime.startup.loader import resolve_runtime, sizing
from lamina.runtime.verify import verify

from ...families import FAMILIES
from ...ranks import as_threads


def test_info_says_what_each_rank_takes(tmp_path: Path) -> None:
    folder = FAMILIES["qwen2"].save(tmp_path)
    told = {}
    for ranks in (1, 2, 4):
        options = [
            "info",
            "--json",
            "--model",
            str(folder),
            "--tensor-parallel",
            str(ranks),
            "--dtype",
            "float32",
        ]
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 0, result.output
        told[ranks] = json.loads(result.stdout)
    assert [told[ranks]["ranks"] for ranks in (1, 2, 4)] == [1, 2, 4]
    per_token = [told[ranks]["cache_kib_per_token"] for ranks in (1, 2, 4)]
    assert per_token == [per_token[0], per_token[0] / 2, per_token[0] / 2], "two heads of keys"
    assert "GiB of KV cache on each of 4 ranks" in told[4]["fit"]
    weights = [
        sizing(RuntimeConfig(model=folder, tensor_parallel=ranks, dtype="float32"), say_nothing).weight_bytes
        for ranks in (1, 2, 4)
    ]
    assert weights[0] > weights[1] > weights[2] > weights[0] / 4


def test_info_says_what_each_stage_takes(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3"].save(tmp_path)
    config = {"model": folder, "dtype": "float32"}
    whole = sizing(RuntimeConfig(**config), say_nothing)
    fit = sizing(RuntimeConfig(**config, pipeline_parallel=3), say_nothing)
    assert [(one.first_layer, one.last_layer) for one in fit.stages] == [(0, 1), (2, 2), (3, 3)]
    assert sum(one.weight_bytes for one in fit.stages) == whole.weight_bytes, "nothing twice, nothing left"
    assert sum(one.token_bytes for one in fit.stages) == whole.token_bytes == 2 * fit.token_bytes
    options = ["info", "--json", "--model", str(folder), "--pipeline-parallel", "3"]
    told = json.loads(CliRunner().invoke(app, options).stdout)
    assert [one["layers"] for one in told["stages"]] == ["0-1", "2-2", "3-3"]
    assert told["ranks"] == 3


def test_stages_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3"].save(tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"pipeline_parallel is 5, .* has 4 layers; wanted at most one"
    ):
        sizing(RuntimeConfig(model=folder, pipeline_parallel=5), say_nothing)
    with pytest.raises(ConfigError, match="executor is 'uniproc' and 2 ranks"):
        RuntimeConfig(model=folder, pipeline_parallel=2, executor="uniproc")
    with pytest.raises(ConfigError, match="pipeline_parallel is 2; wanted 1, since verify compares"):
        verify(RuntimeConfig(model=folder, pipeline_parallel=2), [], 1, say_nothing)


def test_what_ranks_cannot_share_out_is_said_on_the_command_line(tmp_path: Path) -> None:
    folder = FAMILIES["qwen2"].save(tmp_path)
    result = CliRunner().invoke(app, ["info", "--model", str(folder), "--tensor-parallel", "3"])
    assert result.exit_code != 0
    assert "wanted a divisor of num_attention_heads, 4" in str(result.output) + str(result.exception)


@pytest.mark.long
def test_one_machine_warms_up_for_all_ranks(tmp_path: Path, compile_cache: Path) -> None:
    folder = FAMILIES["llama-chunks"].save(tmp_path)
    options = ["--model", str(folder), "--tensor-parallel", "2", "--cache-dir", str(compile_cache)]
    options += ["--dtype", "float32", "--num-kv-blocks", "8"]
    result = CliRunner().invoke(app, ["warmup", "--json", *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["compile"]["pieces"] >= 3
    check = CliRunner().invoke(app, ["warmup", "--check", *options])
    assert check.exit_code == 0, check.output
    alone = CliRunner().invoke(app, ["warmup", "--check", *options[:2], *options[4:]])
    assert alone.exit_code == 1, "the plan of one rank is another"


def test_a_plans_key_holds_how_many_ranks_there_are_and_not_which(tmp_path: Path) -> None:
    folder, keys = FAMILIES["granite"].save(tmp_path), []
    for rank in ThreadGroup(2).ranks:
        with group_of_thread(rank):
            config = RuntimeConfig(model=folder, tensor_parallel=2, num_kv_blocks=8)
            resolved = resolve_runtime(config, say_nothing)
            assert resolved.rank == rank.rank
            factors = resolved.plan_factors()
            assert factors is not None
            keys.append(cache.plan_key(factors))
    alone = resolve_runtime(RuntimeConfig(model=folder), say_nothing).plan_factors()
    assert alone is not None
    assert len({*keys, cache.plan_key(alone)}) == 2


def test_ranks_that_find_other_amounts_of_memory_agree_on_the_least(tmp_path: Path, monkeypatch: Any) -> None:
    folder, found = FAMILIES["granite"].save(tmp_path), {}
    monkeypatch.setattr(memory, "num_kv_blocks", lambda resolved: 100 - 30 * resolved.rank)

    def work(group: Group) -> None:
        config = RuntimeConfig(model=folder, tensor_parallel=2)
        found[group.rank] = resolve_runtime(config, say_nothing).num_kv_blocks

    as_threads(2, work)
    assert found == {0: 70, 1: 70}
    assert resolve_runtime(RuntimeConfig(model=folder, tensor_parallel=2), say_nothing).num_kv_blocks == 100


def test_what_compares_one_process_refuses_several_ranks(tmp_path: Path) -> None:
    config = RuntimeConfig(model=FAMILIES["granite"].save(tmp_path), tensor_parallel=2)
    with pytest.raises(ConfigError, match="tensor_parallel is 2; wanted 1, since verify compares"):
        verify(config, [], 1, say_nothing)
    with pytest.raises(ConfigError, match="tensor_parallel is 2; wanted 1, since mixes are compared"):
        check_batch_invariance(config, [], 1, say_nothing)
    wanted = "tensor_parallel is 2; wanted 3, as this process is one of so many ranks"
    with group_of_thread(ThreadGroup(3).ranks[0]), pytest.raises(UnsupportedError, match=wanted):
        Runtime(config)
