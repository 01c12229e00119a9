"""Tile configuration of the CUDA GEMM kernels; csrc/include/gemm_config.cuh has the same fields."""

from typing import NamedTuple

MAX_CLUSTER, MAX_STAGES = 8, 24  # blocks; of a kernel's pipeline
POWERS = (1, 2, 4, 8)  # blocks of a cluster that divide work evenly
PERSISTENT_TOKENS, MOST_PACE = (128, 256), 8


class GemmConfig(NamedTuple):
    """How a kernel divides a GEMM over blocks, and each block its own part."""

    warpgroups: int  # consumers a block, each for 64 weight rows
    tile_tokens: int  # rows of x, a block
    multicast: int  # blocks of a cluster that share the tiles of x by TMA multicast
    split_k: int  # blocks of a cluster that divide the columns of the same weight rows
    stages: int  # of the pipeline through shared memory, 128 bytes of a row each
    # Of the persistent kernel, from PERSISTENT_TOKENS rows of x a block. Otherwise, of the split-K kernel,
    # over how many times 2,048 clocks it loads its first weights; 0: at once.
    clusters: int = 0

    @property
    def is_persistent(self) -> bool:
        """Whether it is of the persistent kernel."""
        return self.clusters > 0 and self.tile_tokens >= PERSISTENT_TOKENS[0]


def checked(config: GemmConfig) -> GemmConfig:
    """The configuration; ValueError for one that no kernel has, as it would write results twice or never."""
    if not all(type(count) is int for count in config):
        raise ValueError(f"{config} is not of integers")
    multicast, split_k, tokens = config.multicast, config.split_k, config.tile_tokens
    is_even = multicast in POWERS and split_k in POWERS and multicast * split_k <= MAX_CLUSTER
    if not is_even or config.warpgroups not in (1, 2, 4) or tokens % (8 * multicast) or tokens <= 0:
        raise ValueError(f"{config} is none of the kernel's")
    most = MOST_PACE if tokens < PERSISTENT_TOKENS[0] else config.clusters
    if not 2 <= config.stages <= MAX_STAGES or not 0 <= config.clusters <= most:
        raise ValueError(f"{config} is none of the kernel's")
    return config


def tiles_of_stage(tokens: int) -> int:
    """Tiles of 128 bytes of a row that a stage of the split-K kernel has, of so many rows of x a block."""
    return 2 if tokens <= 32 else 1


def stage_bytes(warpgroups: int, tokens: int) -> int:
    """Shared memory of a stage of that kernel; csrc/include/split_k_shape.cuh counts the same."""
    return tiles_of_stage(tokens) * (warpgroups * 8192 + tokens * 128)


def bytes_beside_stages(warpgroups: int, tokens: int) -> int:
    """What a block of it has beside: to align tiles, for barriers, what the system takes, sums of peers."""
    return 2048 + (warpgroups * 64 * tokens * 4 if tokens <= 32 else 0)
