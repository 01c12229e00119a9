"""Which GPU each worker of several ranks sees."""

import os

import pytest
import torch

from lamina.common.errors import ConfigError
from lamina.runtime.startup.over_processes import environments_of_ranks

GPU = torch.device("cuda")


def test_each_rank_sees_the_next_of_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5f,1")
    environments = environments_of_ranks(2, GPU)
    assert environments is not None
    assert [own.pop("CUDA_VISIBLE_DEVICES") for own in environments] == ["3", "GPU-5f"]
    others = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    assert environments == [others, others]


def test_ranks_that_need_no_gpu_of_their_own_see_what_this_process_sees() -> None:
    assert environments_of_ranks(2, torch.device("cpu")) is None
    assert environments_of_ranks(1, torch.device("cuda", 1)) is None


def test_too_few_gpus_and_one_that_is_named_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible in ("", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = len(visible)
        with pytest.raises(ConfigError, match=f"2 ranks .* and {found} are visible; wanted as many"):
            environments_of_ranks(2, GPU)
    with pytest.raises(ConfigError, match="device is 'cuda:1' and 2 ranks have a GPU each; wanted 'cuda'"):
        environments_of_ranks(2, torch.device("cuda", 1))
