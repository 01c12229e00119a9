"""GEMM autotune: what a part of a GPU cannot launch is left out; what else runs on a CPU does not decide."""

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import KernelLaunchError
from lamina.custom_ops.linear import autotune, choices
from lamina.custom_ops.linear.choices import GemmConfig, Site

SITE = Site(kind="linear", num_tokens=128, n=4096, k=64)
CPU = torch.device("cpu")


@pytest.fixture
def clusters_that_fit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """clusters_that_fit(n): a device that launches clusters of up to n blocks, larger ones quicker."""

    def take_at_most(most: int) -> None:
        def launch(
            x: Tensor, weight: Tensor, bias: Tensor | None, config: GemmConfig, splits_all: bool
        ) -> Tensor:
            if config.multicast * config.split_k > most:
                raise KernelLaunchError("linear: too many resources requested (CUDA error 912)")
            return x.new_full((), 10.0 / (config.multicast * config.split_k))

        monkeypatch.setattr(autotune.plain, "launch", launch)

    def microseconds(call: Callable[[Tensor], Any], weights: list[Tensor]) -> float:
        result = call(weights[0])
        return float(result) if result.ndim == 0 else 20.0

    monkeypatch.setattr(autotune, "_microseconds", microseconds)
    monkeypatch.setattr(autotune, "processors_of", lambda device: 132)
    monkeypatch.setattr(autotune, "ROTATED_BYTES", 1)
    return take_at_most


def test_what_cannot_be_launched_is_left_out_and_reported(
    clusters_that_fit: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    clusters_that_fit(2)
    with caplog.at_level(logging.WARNING, "lamina"):
        entry = autotune._measure(SITE, CPU, torch.bfloat16)
    assert isinstance(entry.kernel, GemmConfig)
    assert entry.kernel.multicast * entry.kernel.split_k == 2
    assert (entry.microseconds, entry.otherwise) == (5.0, 20.0)
    tried = choices.candidates(SITE, 132)
    assert len(caplog.messages) == sum(config.multicast * config.split_k > 2 for config in tried) > 0
    assert all("is not tried for linear [4096, 64]" in message for message in caplog.messages)


def test_where_nothing_can_be_launched_the_library_serves(clusters_that_fit: Callable[[int], None]) -> None:
    clusters_that_fit(0)
    entry = autotune._measure(SITE, CPU, torch.bfloat16)
    assert entry.kernel is None
    choices.adopt("a part of a GPU", [entry])
    assert choices.choose(SITE, "a part of a GPU").kernel is None
    assert choices.is_measured(SITE, "a part of a GPU")


@given(st.integers(0, 2**32 - 1), st.floats(0, 0.4))
def test_what_else_runs_does_not_decide_a_race(seed: int, disturbed: float) -> None:
    """Of calls that take 1 and 1.2 ms the first wins, though many of their times are longer by any amount."""
    numbers, now = random.Random(seed), [0.0]

    def call(seconds: float, _: torch.Tensor) -> None:
        now[0] += seconds * (1 + (numbers.random() < disturbed) * numbers.uniform(0, 50))

    calls: list[Any] = [partial(call, 1e-3), partial(call, 1.2e-3)]
    first, second = autotune._race(calls, [torch.empty(0)], lambda: now[0])
    assert first.best < second.best
    assert min(first.spread, second.spread) >= 1
