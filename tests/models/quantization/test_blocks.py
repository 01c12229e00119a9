"""Projections in GGUF's blocks: how rows are stored in each kind, and what models compute with them."""

from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import LoadError, UnsupportedError
from lamina.custom_ops.linear_blocks.layout import KINDS
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.quantization.blocks import STORES, in_blocks
from lamina.models.quantization.model_schemes import uniform
from lamina.models.quantization.scheme import find_scheme
from lamina.models.registry import ParameterSpec, find_model

every_kind = pytest.mark.parametrize("kind", KINDS)
ERRORS = {"Q4_0": 0.11, "Q4_1": 0.09, "Q8_0": 0.007, "Q4_K": 0.11, "Q6_K": 0.03}  # rms of normal weights


def stored(rows: Tensor, kind: str) -> Tensor:
    """The blocks of rows."""
    (part,) = in_blocks(kind).parts(tuple(rows.shape), torch.float32).values()
    blocks = torch.empty(part[0], dtype=part[1])
    STORES[kind](rows, [blocks])
    return blocks


def restored(blocks: Tensor, kind: str) -> Tensor:
    return in_blocks(kind).restore([blocks])


@every_kind
@given(
    rows=st.integers(1, 9), blocks=st.integers(1, 2), exponent=st.integers(-3, 10), seed=st.integers(0, 99)
)
def test_normal_weights_are_off_by_a_step_and_what_was_stored_is_stored_again_as_it_was(
    kind: str, rows: int, blocks: int, exponent: int, seed: int
) -> None:
    """Of a size whose scales are no subnormal float16, which have fewer bits."""
    shape = rows, blocks * KINDS[kind].columns
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    kept = restored(stored(weights, kind), kind)
    for row, wanted in zip(kept, weights, strict=True):
        assert float((row - wanted).norm()) <= 1.5 * ERRORS[kind] * float(wanted.norm())
    again = restored(stored(kept, kind), kind)
    torch.testing.assert_close(again, kept, rtol=2e-3, atol=2e-3 * float(weights.abs().max()))


@every_kind
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37])
def test_equal_weights_are_kept(kind: str, value: float) -> None:
    rows = torch.full((2, 256), value)
    kept = restored(stored(rows, kind), kind)
    torch.testing.assert_close(kept, rows, rtol=2e-3, atol=0)


@given(seed=st.integers(0, 999), tail=st.floats(1, 4))
def test_no_32_columns_in_q4_are_further_off_than_from_their_least_to_their_largest(
    seed: int, tail: float
) -> None:
    """As llama.cpp has Q4_1; of outliers, too."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, 64, generator=generator)
    rows = rows.sign() * rows.abs() ** tail
    theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(rows.numpy(), KIND), KIND))
    ours = restored(stored(rows, "Q4_1"), "Q4_1")
    off, theirs_off = (
        torch.unflatten((kept - rows).square(), 1, (-1, 32)).sum(dim=2) for kept in (ours, theirs)
    )
    assert bool((off <= theirs_off * 1.01 + 1e-12).all())


KIND = gguf.GGMLQuantizationType.Q4_1


@every_kind
@pytest.mark.parametrize(
    "value, message", [(torch.nan, "not finite"), (torch.inf, "not finite"), (4e4, r"weights up to 40000")]
)
def test_weights_that_cannot_be_kept_are_refused(kind: str, value: float, message: str) -> None:
    rows = torch.ones(3, 256)
    rows[1, 77] = value
    with pytest.raises(LoadError, match=message):
        stored(rows, kind)


@every_kind
def test_columns_that_are_no_whole_blocks_are_refused(kind: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"blocks of {kind} cannot keep \\(4, 48\\); wanted columns by"
    ):
        in_blocks(kind).parts((4, 48), torch.float32)


@every_kind
@pytest.mark.parametrize("rows", [3, 16, 40])
def test_what_is_settled_is_what_was_filled(kind: str, rows: int) -> None:
    scheme = in_blocks(kind)
    assert scheme.settle is not None
    assert scheme.filled is not None
    blocks = stored(torch.randn(rows, 256), kind)
    laid_out = blocks.clone()
    scheme.settle([laid_out])
    assert torch.equal(scheme.filled([laid_out])[0], blocks)
    assert torch.equal(laid_out, blocks) == (rows < 16)


def test_the_lm_head_of_q4_is_kept_in_a_byte_a_weight() -> None:
    specs = {
        name: ParameterSpec(shape=(32, 64), sources=(name,), projection=True) for name in ("up", "lm_head")
    }
    schemes = uniform(find_scheme("q4"), specs).schemes
    assert {name: scheme.name for name, scheme in schemes.items()} == {"up": "q4", "lm_head": "q8"}


@pytest.mark.parametrize("name", ["q4", "q8"])
def test_the_error_of_each_projection_of_a_model_is_told(name: str, tiny_folder: Path) -> None:
    config = read_model_config(tiny_folder)
    definition = find_model(config.architecture)
    checkpoint = read_checkpoint(definition, config, tiny_folder)
    schemes = uniform(find_scheme(name), checkpoint.specs)
    loaded = load_weights(checkpoint, dtype=torch.float32, device="cpu", schemes=schemes)
    for parameter, one in loaded.kept().items():
        assert one.error is not None
        assert one.scheme == ("q8" if parameter == "lm_head" else name)
        assert one.error.relative_rms < (0.09 if one.scheme == "q4" else 0.007)


@every_kind
@given(first=st.integers(0, 3), count=st.integers(1, 3), seed=st.integers(0, 99))
def test_ranks_share_out_whole_blocks(kind: str, first: int, count: int, seed: int) -> None:
    columns = KINDS[kind].columns
    weights = torch.randn(2, 6 * columns, generator=torch.Generator().manual_seed(seed))
    scheme, blocks = in_blocks(kind), stored(weights, kind)
    own = scheme.for_columns(6 * columns, count * columns)
    assert own == scheme
    cut = scheme.columns_of([blocks], 6 * columns, (first * columns, count * columns))
    whole = restored(blocks, kind)
    assert torch.equal(own.restore(cut), whole[:, first * columns : (first + count) * columns])
    with pytest.raises(UnsupportedError, match="wanted whole blocks"):
        scheme.for_columns(6 * columns, columns + 16)


def test_ranks_keep_the_scheme_that_was_asked_for() -> None:
    for name in ("q4", "q8"):
        assert find_scheme(name).for_columns(128, 64) is find_scheme(name)
