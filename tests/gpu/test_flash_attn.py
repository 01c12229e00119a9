"""FlashAttention as a provider of lamina::paged_attention, where it is installed; each kind compiles."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.common.errors import UnsupportedError
from lamina.custom_ops._shared.ledger import LEDGER
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.paged_attention import _flash_attn
from lamina.custom_ops.paged_attention.phases import LONGEST_DECODE, select_by_phase

from .paged_cases import CANARY, DEVICE, PagedCase, exact, make_case, naive

pytestmark = pytest.mark.gpu

BFLOAT16 = torch.bfloat16
PROVIDER = {"device": DEVICE, "dtype": BFLOAT16}


@pytest.fixture(scope="module", autouse=True)
def version() -> str:
    """The version at hand, for the shapes that most tests use."""
    choice = _flash_attn.choose(torch.device("cuda", torch.cuda.current_device()), 128, 16)
    if choice.version is None:
        pytest.skip(choice.reason)
    return choice.version.name


def run(case: PagedCase) -> Tensor:
    """What it writes over poison."""
    case.out.fill_(torch.nan)
    select("paged_attention", device=DEVICE, dtype=case.query.dtype, provider="flash_attn").call(*case)
    return case.out.clone()


@pytest.fixture(scope="session")
def check(assert_close_to_reference: Callable[..., None]) -> Callable[[PagedCase], Tensor]:
    """check(case) -> its output: at most twice the naive version's error, zeros for queries without keys."""

    def compare(case: PagedCase) -> Tensor:
        out, expected = run(case), exact(case)
        written = expected.isfinite()
        rest = out[~written]
        assert out[written].isfinite().all(), "poison was read"
        assert (rest.isnan() | (rest == 0)).all(), "rows written that are not its own"
        assert_close_to_reference(out[written], expected[written], naive(case)[written], floor=4e-6)
        return out

    return compare


SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"num_heads": 32, "num_kv_heads": 8},
    "8B, fp16": {"num_heads": 32, "num_kv_heads": 8, "dtype": torch.float16},
    "1B": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "block_size": 64},
    "groups of 3": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "block_size": 32},
    "no groups": {"num_heads": 8, "num_kv_heads": 8, "head_dim": 80, "block_size": 48},
    "groups of 16": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 96},
    "wide heads": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 256, "block_size": 256},
    "soft cap": {"num_heads": 8, "num_kv_heads": 2, "soft_cap": 30.0},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decode_prefill_and_mixed_batches_err_no_more_than_twice_the_plain_version(
    check: Callable[[PagedCase], Tensor], shape: dict[str, Any]
) -> None:
    check(make_case([1, 700, 0, 64, 1029], [1, 1, 1, 1, 1], **shape))
    check(make_case([300, 40, 0, 777], [300, 1, 0, 200], **shape, extra_tokens=3))
    check(make_case([5000, 129], [70, 129], **shape))


def test_a_window_of_readable_blocks(check: Callable[[PagedCase], Tensor]) -> None:
    case = make_case([300, 40, 777, 5000], [300, 1, 200, 1])
    for window in (1, 100, 1000):
        check(case._replace(window=window))


def test_more_sequences_than_one_lookup_takes(check: Callable[[PagedCase], Tensor]) -> None:
    check(make_case([17] * 290 + [400] * 10, [1] * 290 + [300] * 10))


def test_rows_beyond_the_batch_and_heads_beside_the_output_are_left_alone() -> None:
    case = make_case([400, 0, 0], [300, 0, 0], extra_tokens=3)
    whole = torch.full((303, 24, 128), CANARY, dtype=BFLOAT16, device=DEVICE)
    select("paged_attention", provider="flash_attn", **PROVIDER).call(*case._replace(out=whole[:, 8:16]))
    assert whole[:300, 8:16].isfinite().all()
    for untouched in (whole[:, :8], whole[:, 16:], whole[300:]):
        assert (untouched == CANARY).all()


def test_a_captured_call_honours_grown_lengths_and_a_smaller_batch(
    check: Callable[[PagedCase], Tensor],
) -> None:
    static = make_case([4000, 4000, 4000], [1, 1, 1], capacity=4096)
    run(static)  # compiles
    call = select("paged_attention", provider="flash_attn", **PROVIDER).call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*static)
    for seq_lens in ([1, 4000, 129], [3000, 0, 17], [4000, 4000, 4000]):
        static.seq_lens.copy_(torch.tensor(seq_lens))
        expected = check(static)
        static.out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(static.out, expected)


def test_a_kind_of_call_that_was_never_compiled_is_refused_in_a_capture() -> None:
    case = make_case([40], [1], num_heads=10, num_kv_heads=2)
    call = select("paged_attention", provider="flash_attn", **PROVIDER).call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.out.zero_()  # torch warns of an empty graph
        with pytest.raises(UnsupportedError, match="run once before the capture"):
            call(*case)


def test_auto_serves_decode_by_our_kernels_and_prefill_by_it_where_hopper_has_none(version: str) -> None:
    if version != "flash-attn-4":
        pytest.skip(f"{version} was not measured")
    # head_dim 64 and 128 are our own kernel's on Hopper
    selected = select_by_phase("auto", head_dim=96, block_size=16, **PROVIDER)
    assert selected.name == "cuda+flash_attn"
    for query_len in (1, LONGEST_DECODE, LONGEST_DECODE + 1, 300):
        case = make_case([400, 333], [query_len, 1], head_dim=96)
        expected = run(case)
        ours = torch.full_like(case.out, torch.nan)
        select("paged_attention", provider="cuda", **PROVIDER).call(*case._replace(out=ours))
        case.out.fill_(torch.nan)
        selected.call(*case)
        assert torch.equal(case.out, expected if query_len > LONGEST_DECODE else ours)


@pytest.mark.parametrize("shape", [{"block_size": 128}, {"head_dim": 72}], ids=str)
def test_shapes_that_it_does_not_take_are_refused(version: str, shape: dict[str, int]) -> None:
    if version != "flash-attn-4" or importlib.util.find_spec("flash_attn_interface"):
        pytest.skip("another version may take them")
    ((name, value),) = shape.items()
    with pytest.raises(UnsupportedError, match=f"flash-attn-4 .* {name} {value}"):
        run(make_case([50], [20], **shape))


def test_what_was_compiled_lies_in_the_store(version: str) -> None:
    if version != "flash-attn-4":
        pytest.skip(f"{version} compiles nothing")
    run(make_case([50], [20], num_heads=32, num_kv_heads=8))
    assert list(LEDGER.store.outside_folder("flash_attention").rglob("*.o"))
