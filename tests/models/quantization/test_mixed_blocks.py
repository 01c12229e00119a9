"""Fused projections in several kinds of GGUF's blocks: how rows are stored, found again and shared out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import UnsupportedError
from lamina.models.checkpoints import loaded_weights, weight_update
from lamina.models.checkpoints.loaded_weights import LoadedWeights
from lamina.models.quantization.blocks import in_blocks
from lamina.models.quantization.int8 import INT8
from lamina.models.quantization.model_schemes import ModelSchemes
from lamina.models.quantization.scheme import KeptRows, QuantScheme, find_scheme, stacked
from lamina.models.registry import ParameterSpec

COLUMNS = 256
ROWS = {"q": 40, "k": 8, "v": 8}  # no groups of sixteen
KINDS_OF_PARTS = st.tuples(*[st.sampled_from(["Q4_0", "Q8_0", "Q4_K", "Q6_K"])] * 3).filter(
    lambda kinds: len(set(kinds)) > 1
)
Kinds = tuple[str, str, str]
Q4_K_M = ("Q4_K", "Q4_K", "Q6_K")


def scheme_of(kinds: Kinds) -> QuantScheme:
    return stacked([KeptRows(in_blocks(kind), rows) for kind, rows in zip(kinds, ROWS.values(), strict=True)])


def weights_in(kinds: Kinds) -> LoadedWeights:
    spec = ParameterSpec(
        shape=(sum(ROWS.values()), COLUMNS), sources=tuple(ROWS), rows=tuple(ROWS.values()), projection=True
    )
    schemes = ModelSchemes(specs={"qkv": spec}, schemes={"qkv": scheme_of(kinds)})
    return LoadedWeights(schemes, dtype=torch.float32, device="cpu")


def rows_of(seed: int) -> Tensor:
    return torch.randn(sum(ROWS.values()), COLUMNS, generator=torch.Generator().manual_seed(seed))


def stored_alone(rows: Tensor, kinds: Kinds) -> Tensor:
    """What each part's own scheme makes of its rows."""
    kept = []
    for part, kind in zip(torch.split(rows, list(ROWS.values())), kinds, strict=True):
        scheme = in_blocks(kind)
        blocks = [torch.empty(shape, dtype=dtype) for shape, dtype in _tables(scheme, part)]
        scheme.store(part, blocks)
        kept.append(scheme.restore(blocks))
    return torch.cat(kept)


def _tables(scheme: QuantScheme, rows: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return list(scheme.parts((rows.shape[0], rows.shape[1]), torch.float32).values())


@given(kinds=KINDS_OF_PARTS, chunk=st.integers(1, 60), seed=st.integers(0, 99))
def test_rows_are_stored_as_those_of_their_kind_however_many_come_at_once(
    kinds: Kinds, chunk: int, seed: int
) -> None:
    rows, weights = rows_of(seed), weights_in(kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded_weights, "CHUNK_ELEMENTS", chunk * COLUMNS)
        weights.take("qkv", 0, rows)
    wanted = stored_alone(rows, kinds)
    error = weights.total_error()
    weights.settle()
    restored = weights.schemes.restored(weights.by_name)
    assert torch.equal(torch.cat([restored[name] for name in ROWS]), wanted)
    assert error.max_error == pytest.approx(float((wanted - rows).abs().max()))


@given(
    kinds=KINDS_OF_PARTS,
    x_rows=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_once_laid_out_one_call_multiplies_all_rows(kinds: Kinds, x_rows: int, dtype: torch.dtype) -> None:
    weights = weights_in(kinds)
    weights.take("qkv", 0, rows_of(0))
    weights.settle()
    scheme, parts = weights.schemes.schemes["qkv"], [weights.by_name["qkv"]]
    assert scheme.multiply is not None
    assert scheme.filled is not None
    x = torch.randn(x_rows, COLUMNS).to(dtype)
    dense = scheme.restore(scheme.filled(parts))
    wanted = x.double() @ dense.double().T
    found = scheme.multiply(x, parts, None).double()
    assert float((found - wanted).norm()) < 0.02 * float(wanted.norm())  # x has eight bits


@given(kinds=KINDS_OF_PARTS, start=st.integers(0, 55), count=st.integers(1, 56))
def test_some_rows_are_kept_by_the_scheme_of_those(kinds: Kinds, start: int, count: int) -> None:
    whole = scheme_of(kinds)
    count = min(count, sum(ROWS.values()) - start)
    rows = rows_of(1)
    parts = [torch.empty(shape, dtype=dtype) for shape, dtype in _tables(whole, rows)]
    whole.store(rows, parts)
    assert whole.narrow is not None
    some, own = whole.narrow(parts, start, count), whole.of_rows(start, count)
    assert [tuple(part.shape) for part in some] == [shape for shape, _ in _tables(own, rows[start:][:count])]
    assert torch.equal(own.restore(some), whole.restore(parts)[start : start + count])


def test_projections_of_the_same_rows_have_one_scheme_and_others_another() -> None:
    assert scheme_of(Q4_K_M) is scheme_of(Q4_K_M)
    schemes = {"a": scheme_of(Q4_K_M), "b": scheme_of(Q4_K_M), "c": scheme_of(("Q6_K", "Q4_K", "Q4_K"))}
    facts = ModelSchemes(specs={}, schemes=schemes).facts()["schemes"]
    assert list(facts.values()) == [["a", "b"], ["c"]]
    assert next(iter(facts)) == (
        "q4_k+q6_k: in the file's blocks, 48 rows of Q4_K, 8 rows of Q6_K: Q4_K has four bits a weight, a "
        "scale and a minimum for 32 columns; Q6_K has six bits a weight, a scale for 16 columns"
    )
    assert scheme_of(("Q4_K", "Q4_K", "Q4_K")) is in_blocks("Q4_K")


def test_a_rank_has_its_own_rows_of_each_kind() -> None:
    own = scheme_of(Q4_K_M).for_rows([20, 4, 4])
    assert [(run.scheme.name, run.num_rows) for run in own.runs] == [("q4_k", 20), ("q4_k", 4), ("q6_k", 4)]
    assert own.parts((28, COLUMNS), torch.float32)[""][0] == (24 * 144 + 4 * 210,)


def test_what_ranks_cannot_share_out_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'q4_k\+q6_k', which keeps rows of 512 columns whole"):
        scheme_of(Q4_K_M).for_columns(512, 256)


@pytest.mark.parametrize("shape", [(57, 256), (56, 128)])
def test_a_shape_that_does_not_fit_is_refused(shape: tuple[int, int]) -> None:
    message = r"Q4_K:48\+Q6_K:8 cannot keep .*; wanted 56 rows and columns by 256"
    with pytest.raises(UnsupportedError, match=message):
        scheme_of(Q4_K_M).parts(shape, torch.float32)


@pytest.mark.parametrize("other", [INT8, find_scheme("q8"), find_scheme("dense")], ids=lambda one: one.name)
def test_rows_that_are_kept_otherwise_are_refused(other: QuantScheme) -> None:
    runs = [KeptRows(other, 16), KeptRows(in_blocks("Q4_K"), 32)]
    for both in (runs, runs[::-1]):
        with pytest.raises(UnsupportedError, match=r"16 rows are kept .*; wanted all in blocks of a file"):
            stacked(both)


def test_an_update_of_weights_that_were_made_up_is_stored_by_kind() -> None:
    """A file's own blocks are not replaced; load_format="dummy" has none."""
    weights = weights_in(Q4_K_M)
    weights.take("qkv", 0, rows_of(2))
    weights.settle()
    given_ = dict(zip(ROWS, torch.split(rows_of(3), list(ROWS.values())), strict=True))
    slots = weight_update.check_update(weights, weight_update.headers_of(given_))
    weight_update.check_values(weights, slots, given_)
    weight_update.write(weights, slots, given_)
    restored = weights.schemes.restored(weights.by_name)
    assert torch.equal(torch.cat([restored[name] for name in ROWS]), stored_alone(rows_of(3), Q4_K_M))
