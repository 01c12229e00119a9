"""Weights replaced in place by tensors that somebody holds: all is checked first, and then all is written."""

from collections.abc import Container, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.errors import LoadError, RequestError, UnsupportedError, shown
from ..config import DTYPES
from .loaded_weights import CHUNK_ELEMENTS, LoadedWeights
from .quantized.kv_scales import is_kv_scale
from .shards import listed
from .weights import DERIVED_TENSORS, Slot, slots_of


class Header(NamedTuple):
    """What is said of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def headers_of(given: Mapping[str, Tensor]) -> dict[str, Header]:
    """The headers of tensors by name; RequestError for what is no tensor with values of its own."""
    for name, tensor in given.items():
        if not isinstance(name, str):
            raise RequestError(f"a name of weights is {shown(name)}; wanted a string")
        if not isinstance(tensor, Tensor):
            raise RequestError(f"{name} is {shown(tensor)}; wanted a tensor")
        if hasattr(tensor, "full_tensor"):
            raise RequestError(f"{name} is a part of a tensor that others share; wanted its full_tensor()")
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            raise RequestError(f"{name} has no values that lie in memory; wanted a dense tensor")
    return {name: Header(tuple(tensor.shape), tensor.dtype) for name, tensor in given.items()}


def check_update(
    weights: LoadedWeights,
    headers: Mapping[str, Header],
    quantized: Container[str] = (),
    *,
    is_whole: bool = False,
) -> dict[str, Slot]:
    """Where each tensor belongs, by name; nothing is written.

    quantized: names that a checkpoint with quantized projections uses for them. is_whole: every parameter is
    to be given. RequestError for a name without a place, a shape or dtype amiss, a projection with a scheme
    of which a part is missing, and for nothing at all; UnsupportedError for projections of such a checkpoint.
    """
    wanted = {name: one for name, one in headers.items() if not DERIVED_TENSORS.fullmatch(name)}
    _refuse_quantized(wanted, quantized)
    slots = slots_of(weights.schemes.whole_specs)
    if unknown := sorted(wanted.keys() - slots.keys()):
        raise RequestError(f"the model has no place for {listed(unknown)}")
    for name, header in wanted.items():
        _check_header(name, header, slots[name])
    filled = {name: slots[name] for name in wanted}
    if not filled:
        raise RequestError("no weights were given; wanted tensors by the names that checkpoints use")
    _check_whole(weights, slots, filled, quantized, is_whole=is_whole)
    return filled


def check_values(weights: LoadedWeights, slots: Mapping[str, Slot], given: Mapping[str, Tensor]) -> None:
    """Raise RequestError where tied tensors differ, or a scheme cannot keep what is given; writes nothing."""
    owners = {slot: name for name, slot in slots.items() if not slot.is_copy}
    for name, slot in slots.items():
        own = owners.get(slot._replace(is_copy=False))
        if slot.is_copy and own is not None and not torch.equal(given[name], given[own].to(given[name])):
            raise RequestError(
                f"{name} differs from {own}, which it is tied to; wanted one of them, or equal ones"
            )
        for projection in weights.kept_with(slot.parameter):
            try:
                _try_to_store(weights, projection, slot.start, given[name])
            except LoadError as error:
                raise RequestError(f"{name} {error}") from error


def write(weights: LoadedWeights, slots: Mapping[str, Slot], given: Mapping[str, Tensor]) -> None:
    """Fill the places of what was checked, of several ranks this one's part of each.

    Whatever ends it halfway leaves part of the weights written.
    """
    slots = {name: slot for name, slot in slots.items() if slot.parameter in weights.specs}  # of its stage
    parameters = {slot.parameter for slot in slots.values()}
    touched = {name for parameter in parameters for name in weights.kept_with(parameter)}
    weights.renew(touched)
    places = {slot._replace(is_copy=False): name for name, slot in slots.items()}
    shares = weights.schemes.shares(weights.rank)
    for slot, name in places.items():
        for run in shares[name].runs:
            rows = given[name].detach().narrow(0, run.start, run.num_rows)
            weights.take(slot.parameter, run.to, rows, shares[name].columns)
    weights.fill_up(parameters | touched)
    weights.settle(touched)


def _refuse_quantized(wanted: Mapping[str, Header], quantized: Container[str]) -> None:
    for name in wanted:
        if name in quantized:
            raise UnsupportedError(
                f"{name} is of a projection that the checkpoint has quantized already, which tensors do not "
                "replace; give a folder of the same format, or serve the checkpoint that it was made of"
            )
        if is_kv_scale(name):
            raise UnsupportedError(f"{name} is a scale of the KV cache, which stays as it is; leave it out")


def _check_header(name: str, header: Header, slot: Slot) -> None:
    if header.shape != slot.shape:
        raise RequestError(f"{name} has shape {list(header.shape)}; wanted {list(slot.shape)}")
    if header.dtype not in DTYPES.values():
        raise RequestError(f"{name} has dtype {header.dtype}; wanted one of {', '.join(DTYPES)}")


def _check_whole(
    weights: LoadedWeights,
    slots: Mapping[str, Slot],
    filled: Mapping[str, Slot],
    quantized: Container[str],
    *,
    is_whole: bool,
) -> None:
    """A projection is quantized whole, since scales may be of several of its parts together."""
    given = {slot._replace(is_copy=False) for slot in filled.values()}
    touched = {slot.parameter for slot in given}
    missing = [
        name
        for name, slot in slots.items()
        if name not in quantized and slot._replace(is_copy=False) not in given
        if is_whole or (slot.parameter in touched and weights.kept_with(slot.parameter))
    ]
    if missing:
        why = "all weights" if is_whole else "every part of a projection that is quantized as it comes"
        raise RequestError(f"{listed(missing)} are missing; wanted {why}")


def _try_to_store(weights: LoadedWeights, projection: str, start: int, rows: Tensor) -> None:
    """Keep rows from `start` onward as the scheme would, in memory that is dropped."""
    kept_by = weights.schemes.whole_schemes or weights.schemes.schemes
    step = max(1, CHUNK_ELEMENTS // rows.shape[1])
    for first in range(0, rows.shape[0], step):
        chunk = rows[first : first + step].detach().to(weights.device, torch.float32)
        scheme = kept_by[projection].of_rows(start + first, chunk.shape[0])
        table = scheme.parts(tuple(chunk.shape), weights.dtype)
        scheme.store(chunk, [torch.empty(s, dtype=kind, device=weights.device) for s, kind in table.values()])
