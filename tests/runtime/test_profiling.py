"""Profiles of a runtime: a trace a rank, of what was computed meanwhile."""

import json
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina import RequestError, Runtime, SamplingParams

SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 16, "max_model_len": 64, "compile": False}

LAYERS = 2


def calls_in(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_writes_what_it_computed(ranks: int, tiny_folder: Path, tmp_path: Path) -> None:
    with Runtime.from_pretrained(tiny_folder, **SETTINGS, tensor_parallel=ranks) as runtime:
        with lamina.profile(runtime, tmp_path / "once") as folder:
            runtime.generate([[1, 2, 3]], SHORT)
        with lamina.profile(runtime, tmp_path / "again"):
            pass
        assert runtime.generate([[1, 2, 3]], SHORT)
    assert sorted(path.name for path in folder.iterdir()) == [f"rank{rank}.json" for rank in range(ranks)]
    for path in folder.iterdir():
        assert calls_in(path).count("aten::mm") >= 3 * LAYERS  # of three steps, a projection of each layer
    assert "aten::mm" not in calls_in(tmp_path / "again" / "rank0.json")


def test_a_second_profile_at_once_is_refused_and_the_first_goes_on(tiny_folder: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    with Runtime.from_pretrained(tiny_folder, **SETTINGS) as runtime, lamina.profile(runtime, first):
        again = lamina.profile(runtime, tmp_path / "second")
        with pytest.raises(RequestError, match=r"profiled already, into .*first"):
            again.__enter__()
        runtime.generate([[1, 2, 3]], SHORT)
    assert "aten::mm" in calls_in(first / "rank0.json")
