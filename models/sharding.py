"""How the weights of a model are shared out among ranks: sizes of one rank, and which part of each is its."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..common.errors import UnsupportedError
from .registry import ModelDefinition, ParameterSpec

if TYPE_CHECKING:
    from .config import ModelConfig

ROWS, COLUMNS = 0, 1  # of a projection, [out, in]


def config_of_rank(config: "ModelConfig", ranks: int) -> "ModelConfig":
    """The config by which a rank of so many computes: its own number of heads and columns, all else as it is.

    Key-value heads are repeated where there are fewer than ranks. UnsupportedError, naming the setting and
    the field, for what cannot be shared out evenly.
    """
    if ranks == 1:
        return config
    kv_heads = config.num_kv_heads
    for name, value in (
        ("num_attention_heads", config.num_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if value % ranks:
            raise UnsupportedError(f"tensor_parallel is {ranks}; wanted a divisor of {name}, {value}")
    if kv_heads % ranks and ranks % kv_heads:
        wanted = f"a divisor or a multiple of num_key_value_heads, {kv_heads}"
        raise UnsupportedError(f"tensor_parallel is {ranks}; wanted {wanted}")
    if config.vocab_size < ranks:
        raise UnsupportedError(f"tensor_parallel is {ranks}; wanted at most vocab_size, {config.vocab_size}")
    return dataclasses.replace(
        config,
        ranks=ranks,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(1, kv_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
    )


class Run(NamedTuple):
    """Rows that follow each other in a checkpoint tensor, and the row of the parameter that they begin at."""

    start: int
    num_rows: int
    to: int


class Share(NamedTuple):
    """What is kept of a checkpoint tensor: runs of its rows, and columns of them."""

    runs: tuple[Run, ...]
    columns: tuple[int, int] | None = None  # the first, and how many; None: all, or there are none


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """A model as one of several ranks has it: its parameters, and what they are of those of the whole."""

    ranks: int
    specs: Mapping[str, ParameterSpec]  # of a rank
    whole: Mapping[str, ParameterSpec]

    def shares(self, parameter: str, rank: int) -> dict[str, Share]:
        """What a rank keeps of each source of a parameter."""
        return _shares(parameter, self.whole[parameter], self.specs[parameter], rank, self.ranks)

    def shares_rows_of(self, parameter: str) -> bool:
        """Whether there is such a parameter, of whose rows each rank has some."""
        own, whole = self.specs.get(parameter), self.whole.get(parameter)
        return own is not None and whole is not None and own.shape[0] != whole.shape[0]

    def is_shared(self, parameter: str) -> bool:
        """Whether ranks have parts of a parameter."""
        return self.specs[parameter].shape != self.whole[parameter].shape


def sharding_of(definition: ModelDefinition, config: "ModelConfig", ranks: int) -> Sharding:
    """How a definition shares its model out among so many ranks.

    UnsupportedError, naming the parameter, where it does not say along which dimension, or not as its shapes
    do.
    """
    whole = definition.parameters(config)
    specs = definition.parameters(config_of_rank(config, ranks))
    sharding = Sharding(ranks=ranks, specs=specs, whole=whole)
    for name, spec in whole.items():
        _check(name, spec, specs.get(name), ranks)
        for rank in range(ranks):
            sharding.shares(name, rank)
    return sharding


def _check(name: str, whole: ParameterSpec, own: ParameterSpec | None, ranks: int) -> None:
    """Whether a parameter may be kept in parts, if it is."""
    said = f"tensor_parallel is {ranks}, and {name} is {list(whole.shape)}"
    if own is None or own.sources != whole.sources or len(own.shape) != len(whole.shape):
        raise UnsupportedError(f"{said} of {whole.sources[0]}; wanted one of the same kind for each rank")
    differing = [
        dim for dim, sizes in enumerate(zip(own.shape, whole.shape, strict=True)) if len({*sizes}) > 1
    ]
    axis = whole.shard_axis
    if any(dim != axis for dim in differing):
        raise UnsupportedError(
            f"{said}, {list(own.shape)} for each rank, where shard_axis is {axis}; the model's definition "
            "must say along which dimension ranks share it out"
        )
    is_matrix = len(whole.shape) > 1
    if differing and is_matrix and not (whole.projection or (whole.table and axis == ROWS)):
        raise UnsupportedError(
            f"{said}, of which each rank has a part, but no projection and no table; the model's definition "
            "must give it to ops.linear or ops.embedding alone, and say so"
        )
    if own.shape[0] * ranks > whole.shape[0] and len(whole.part_rows) > 1 and _is_padded(whole, own, ranks):
        raise UnsupportedError(f"{said} in parts that {ranks} do not divide; wanted equal parts")
    if axis == COLUMNS and own.shape[axis] * ranks != whole.shape[axis]:
        raise UnsupportedError(f"{said}, {list(own.shape)} for each rank; wanted equal parts of its columns")


def _shares(name: str, whole: ParameterSpec, own: ParameterSpec, rank: int, ranks: int) -> dict[str, Share]:
    is_cut = whole.shard_axis == COLUMNS and own.shape != whole.shape
    columns = (rank * own.shape[1], own.shape[1]) if is_cut else None
    runs: dict[str, list[Run]] = {source: [] for source in whole.sources}
    place, row = 0, 0  # in the source, in the parameter
    for index, (all_rows, own_rows) in enumerate(zip(whole.part_rows, own.part_rows, strict=True)):
        is_fused = len(whole.sources) > 1
        source, place = (whole.sources[index], 0) if is_fused else (whole.sources[0], place)
        first = _first_row(name, all_rows, own_rows, rank, ranks)
        count = max(0, min(own_rows, all_rows - first))
        runs[source].append(Run(place + first, count, row))
        place, row = place + all_rows, row + own_rows
    return {source: Share(tuple(some), columns) for source, some in runs.items()}


def _first_row(name: str, all_rows: int, own_rows: int, rank: int, ranks: int) -> int:
    """Where a rank's rows of a part begin: parts are equal, or several ranks', or the last are short."""
    if all_rows != own_rows * ranks and all_rows % own_rows == 0 and own_rows * ranks % all_rows == 0:
        return rank * all_rows // ranks // own_rows * own_rows
    if own_rows == -(-all_rows // ranks):
        return rank * own_rows
    raise UnsupportedError(
        f"tensor_parallel is {ranks}, and a part of {name} has {all_rows} rows, {own_rows} for each rank; "
        "wanted equal parts"
    )


def _is_padded(whole: ParameterSpec, own: ParameterSpec, ranks: int) -> bool:
    return any(
        own_rows * ranks > all_rows and own_rows * ranks % all_rows
        for all_rows, own_rows in zip(whole.part_rows, own.part_rows, strict=True)
    )
