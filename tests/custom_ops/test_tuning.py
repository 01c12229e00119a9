"""Measuring which kernel serves a product: what a part of a GPU cannot launch is left out, and told."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.common.errors import KernelLaunchError
from lamina.custom_ops.linear import choices, tuning
from lamina.custom_ops.linear.choices import Cut, Site

SITE = Site(kind="linear", num_tokens=128, n=4096, k=64)
CPU = torch.device("cpu")


@pytest.fixture
def clusters_that_fit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """clusters_that_fit(n): a device that launches clusters of up to n blocks, larger ones quicker."""

    def take_at_most(most: int) -> None:
        def launch(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
            if cut.share * cut.split > most:
                raise KernelLaunchError("linear: too many resources requested (CUDA error 912)")
            return x.new_full((), 10.0 / (cut.share * cut.split))

        monkeypatch.setattr(tuning.plain, "launch", launch)

    def microseconds(call: Callable[[Tensor], Any], weights: list[Tensor]) -> float:
        result = call(weights[0])
        return float(result) if result.ndim == 0 else 20.0

    monkeypatch.setattr(tuning, "_microseconds", microseconds)
    monkeypatch.setattr(tuning, "processors_of", lambda device: 132)
    monkeypatch.setattr(tuning, "ROTATED_BYTES", 1)
    return take_at_most


def test_what_cannot_be_launched_is_left_out_and_told(
    clusters_that_fit: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    clusters_that_fit(2)
    with caplog.at_level(logging.WARNING, "lamina"):
        entry = tuning._measure(SITE, CPU, torch.bfloat16)
    assert isinstance(entry.cut, Cut)
    assert entry.cut.share * entry.cut.split == 2
    assert (entry.microseconds, entry.otherwise) == (5.0, 20.0)
    tried = choices.candidates(SITE, 132)
    assert len(caplog.messages) == sum(cut.share * cut.split > 2 for cut in tried) > 0
    assert all("is not tried for linear [4096, 64]" in message for message in caplog.messages)


def test_where_nothing_can_be_launched_the_library_serves(clusters_that_fit: Callable[[int], None]) -> None:
    clusters_that_fit(0)
    entry = tuning._measure(SITE, CPU, torch.bfloat16)
    assert entry.cut is None
    choices.adopt("a part of a card", [entry])
    assert choices.choose(SITE, "a part of a card").cut is None
    assert choices.is_measured(SITE, "a part of a card")
