"""lamina::linear_lora by the CUDA kernels of both: what adapters add is summed while the projection runs.

Of few rows the GEMM lets lora's kernel begin as soon as x is complete, and leaves it shared memory beside
itself. More rows, adapters of ranks that need more room, and projections by the library are the ops apart.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from .._shared.cuda_kernel import DEVICES
from .._shared.registry import Provider
from ..linear import _cuda as gemm
from ..linear.choices import MAX_SHARED, GemmConfig, ceil_div, processors_of
from ..linear.gemm_config import bytes_beside_stages, stage_bytes
from ..lora import _cuda as adapters
from ._composed import linear_lora as apart

MOST_ROWS = 32  # of a window of lora_cluster.cuh: with more, fewer of its blocks would find room
MOST_ROOM = 24 << 10  # bytes of shared memory, for which the GEMM's pipeline gives up a stage
FEW_ROWS = 8  # beyond, a processor has one block of lora's beside the GEMM, which then keeps the more stages
PREFETCHES = True  # whether the GEMM asks for the adapters while it waits for x
VECTOR = 16  # bytes
RANK_BYTES, BARRIER_BYTES, SYSTEM_BYTES = 9728, 16, 1024  # of 16 ranks, ClusterMemory; of any block


def load() -> Callable[..., Tensor]:
    """Build or load the kernels; the op's function on them."""
    gemm.load()
    adapters.find_kernel()
    return linear_lora


def linear_lora(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
    batch_invariant: bool = False,
) -> Tensor:
    """The op, as op.py states it."""
    find, added = gemm.config_of_one_order if batch_invariant else gemm.config_of, (a, b, scales, slots, rows)
    block = block_bytes(b.shape[2])
    config = find("linear", x, weight) if len(x) <= MOST_ROWS and block <= MOST_ROOM else None
    if config is None or config.is_persistent:  # which leaves no room
        return apart(x, weight, bias, *added, batch_invariant)
    behind = gemm.AdaptersBehind(a, b, slots) if PREFETCHES and whole_vectors(a, b) else None
    blocks = blocks_beside(len(x), block)
    config = leave_room(config, blocks * block)
    y = gemm.launch(x, weight, bias, config, batch_invariant, promises_x=True, behind=behind)
    return adapters.launch(y, x, *added, blocks_beside=blocks * processors_of(x.device))


def whole_vectors(*matrices: Tensor) -> bool:
    """Whether what each slot has of these lies in multiples of 16 bytes."""
    return all(
        one.data_ptr() % VECTOR == 0 and one[0].numel() * one.element_size() % VECTOR == 0 for one in matrices
    )


def block_bytes(rank: int) -> int:
    """Shared memory of a block of lora's kernel."""
    return ceil_div(rank, 16) * RANK_BYTES + BARRIER_BYTES + SYSTEM_BYTES


def blocks_beside(num_tokens: int, block: int) -> int:
    """Of lora's blocks of so many bytes, how many a processor is to have beside the GEMM's."""
    return MOST_ROOM // block if num_tokens <= FEW_ROWS else 1


def leave_room(config: GemmConfig, room: int) -> GemmConfig:
    """The split-K kernel of few rows in 16 bits with as many stages less as leave a processor so many bytes.

    It keeps two stages in any case, and as many blocks a processor as before. Stages change no bits.
    """
    shape = config.warpgroups, config.tile_tokens
    stage, beside = stage_bytes(*shape), bytes_beside_stages(*shape)
    blocks = MAX_SHARED // (config.stages * stage + beside)
    stages = ((MAX_SHARED - room) // max(blocks, 1) - beside) // stage
    return config._replace(stages=max(2, min(config.stages, stages)))


PROVIDER = Provider(name="cuda", load=load, devices=DEVICES, dtypes=gemm.PROVIDER.dtypes)
