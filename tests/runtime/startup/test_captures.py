"""Which sizes of mixed steps are captured: those of which the host is as slow as the GPU, however noisy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.startup.captures import LARGE_MIXED_SIZES, launch_bound_tokens

MOST = LARGE_MIXED_SIZES[-1]


@given(st.lists(st.floats(5e-3, 50e-3), min_size=1, max_size=5), st.floats(0, 0.2))
def test_a_host_that_is_waited_for_has_every_size_captured_whatever_its_pace(
    paces: list[float], drain: float
) -> None:
    """Launching takes all the time but for what the GPU does after the last launch."""
    seconds = [(launched, launched * (1 + drain)) for launched in paces]
    assert launch_bound_tokens(MOST, seconds) >= MOST


@pytest.mark.parametrize(("launched", "captured"), [(0.012, 0), (0.018, 768), (0.024, 1024), (0.036, 1792)])
def test_a_gpu_that_is_slower_has_only_the_sizes_captured_that_it_computes_as_fast(
    launched: float, captured: int
) -> None:
    most = launch_bound_tokens(MOST, [(launched, 0.050)] * 3)
    assert max((size for size in LARGE_MIXED_SIZES if size <= most), default=0) == captured


def test_one_step_that_was_disturbed_decides_nothing() -> None:
    assert launch_bound_tokens(MOST, [(0.010, 0.050), (0.048, 0.050), (0.010, 0.050)]) == MOST // 4
