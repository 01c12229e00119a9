"""FlashAttention 4, 3 or 2, where one is installed, as a provider of lamina::paged_attention.

Each is an optional package with limits of its own; the most recent that takes a GPU, head_dim and block_size
serves them. All write zeros for queries of a sequence without keys, and all read whole tiles of keys: with a
window, block_tables must hold readable blocks of finite values a tile before it.
"""

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common import env
from ...common.errors import UnsupportedError
from .._shared.fp8 import FP8
from .._shared.ledger import LEDGER
from .._shared.registry import Call, Provider
from ._arguments import check_rows

DTYPES = frozenset({torch.bfloat16, torch.float16})
INVARIANCE_OBSTACLE = "batch_invariant is True; FlashAttention splits keys by the batch"
FP8_OBSTACLE = "flash_attn does not take a cache in FP8 beside queries that are not"
MISSING = "flash_attn is not installed; pip install 'flash-attn-4[cu13]' (on Hopper, Blackwell) or flash-attn"
BATCH_OF_OTHER_KERNELS = 256  # with more sequences, flash-attn-4 runs others


class Facts(NamedTuple):
    """What the limits of a version depend on."""

    capability: tuple[int, int]  # of the GPU
    head_dim: int
    block_size: int


class Arguments(NamedTuple):
    """The op's arguments, in order."""

    out: Tensor
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    scale: float
    window: int
    chunk: int
    soft_cap: float
    key_scale: float = 1.0
    value_scale: float = 1.0
    batch_invariant: bool = False


Attend = Callable[[Arguments], None]


class Version(NamedTuple):
    """One generation of FlashAttention."""

    name: str
    module: str  # there if it is installed
    beats_ours: bool  # in prefill, as far as was measured
    obstacle: Callable[[Facts], str | None]  # why it cannot serve them
    load: Callable[[], Attend]  # may take seconds


class Choice(NamedTuple):
    """The version that serves some facts and its call, or why none does."""

    version: Version | None
    attend: Attend | None
    reason: str


def load() -> Call:
    """The provider's call: which version it is follows from the tensors."""
    if not any(_is_installed(version) for version in VERSIONS):
        raise UnsupportedError(MISSING)

    def paged_attention(*args: Any) -> None:
        a = Arguments(*args)
        if a.key_cache.dtype == FP8:
            raise UnsupportedError(f"paged_attention: {FP8_OBSTACLE}")
        if a.batch_invariant:
            raise UnsupportedError(f"paged_attention: {INVARIANCE_OBSTACLE}")
        check_rows(a.out, a.query, a.key_cache, a.value_cache)  # else whole caches would be copied
        choice = choose(a.query.device, a.query.shape[2], a.key_cache.shape[1])
        if choice.attend is None:
            raise UnsupportedError(f"paged_attention: {choice.reason}")
        if a.chunk >= 0:
            raise UnsupportedError(f"paged_attention: chunk is {a.chunk}; FlashAttention takes none")
        if a.query.shape[0] and a.seq_lens.shape[0]:
            choice.attend(a)

    return paged_attention


@functools.cache
def choose(device: torch.device, head_dim: int, block_size: int) -> Choice:
    """The version for a GPU and these sizes."""
    capability = torch.cuda.get_device_capability(device)
    return choose_version(Facts(capability, head_dim, block_size), VERSIONS)


def choose_version(facts: Facts, versions: Sequence[Version]) -> Choice:
    """The first version that is installed, takes these facts and can be imported; else every obstacle."""
    obstacles = []
    for version in versions:
        if not _is_installed(version):
            continue
        obstacle = version.obstacle(facts)
        if obstacle is None:
            try:
                return Choice(version, version.load(), version.name)
            except Exception as error:  # whatever another package raises when it is imported
                obstacle = f"cannot be imported: {type(error).__name__}: {error}"
        obstacles.append(f"{version.name} {obstacle}")
    return Choice(None, None, "; ".join(obstacles) or MISSING)


def _is_installed(version: Version) -> bool:
    try:
        return importlib.util.find_spec(version.module) is not None
    except ImportError:  # a package around it is missing or broken
        return False


def _obstacle_4(facts: Facts) -> str | None:
    (major, minor), head_dim, block_size = facts
    if major not in (9, 10, 11):
        return f"has no paged keys on compute capability {major}.{minor}; wanted 9, 10 or 11"
    widest = 256 if major == 9 else 128
    if head_dim % 16 or (head_dim > widest and head_dim != 256):
        return f"does not take head_dim {head_dim}; wanted a multiple of 16 up to {widest}, or 256"
    # Where a page is a tile of keys it is loaded whole, and a NaN behind the sequence's end would spread.
    tiles = (128,) if head_dim <= 128 else (64, 80, 96, 112, 128)
    if block_size in tiles:
        return f"reads behind a sequence's end with block_size {block_size}; wanted another, such as 16"
    return None


def _obstacle_3(facts: Facts) -> str | None:
    (major, minor), head_dim, block_size = facts
    if major != 9:
        return f"does not run on compute capability {major}.{minor}; wanted 9"
    if head_dim % 8 or head_dim > 256:
        return f"does not take head_dim {head_dim}; wanted a multiple of 8 up to 256"
    if block_size >= 64:  # pages may be loaded whole, as above
        return f"may read behind a sequence's end with block_size {block_size}; wanted less than 64"
    return None


def _obstacle_2(facts: Facts) -> str | None:
    (major, minor), head_dim, block_size = facts
    if major < 8:
        return f"does not run on compute capability {major}.{minor}; wanted 8 or more"
    if head_dim % 8 or head_dim > 256:
        return f"does not take head_dim {head_dim}; wanted a multiple of 8 up to 256"
    if block_size % 256:
        return f"does not take block_size {block_size}; wanted a multiple of 256"
    return None


def _load_4() -> Attend:
    """The inner forward, which takes `out`; it compiles at the first call of a kind, and keeps that."""
    env.keep_flash_attention_kernels(LEDGER.store.outside_folder("flash_attention"))
    with _without_warnings():
        forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    compiled = set()

    def attend(a: Arguments) -> None:
        kind = (
            *(a.query.device, a.query.dtype, a.query.shape[1:], a.key_cache.shape[1:]),
            *(a.window < 0, a.soft_cap, a.seq_lens.shape[0] > BATCH_OF_OTHER_KERNELS),
        )
        if kind in compiled:
            run(a)
            return
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("flash-attn-4 has no kernel for this yet; run once before the capture")
        with _without_warnings():
            run(a)
        compiled.add(kind)

    def run(a: Arguments) -> None:
        forward(
            a.query,
            a.key_cache,
            a.value_cache,
            out=a.out,
            cu_seqlens_q=a.query_start_loc,  # without max_seqlen_q, one kernel serves every query length
            seqused_k=a.seq_lens,
            page_table=a.block_tables,
            softmax_scale=a.scale,
            causal=True,
            softcap=a.soft_cap,
            window_size_left=None if a.window < 0 else a.window - 1,
        )

    return attend


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Another package's imports and compilations warn of its own deprecated parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _load_3() -> Attend:
    importlib.import_module("flash_attn_interface")  # registers the op
    forward = torch.ops.flash_attn_3.fwd

    def attend(a: Arguments) -> None:
        forward(
            a.query,
            a.key_cache,
            a.value_cache,
            out=a.out,
            cu_seqlens_q=a.query_start_loc,
            seqused_k=a.seq_lens,
            max_seqlen_q=a.max_query_len,
            page_table=a.block_tables,
            softmax_scale=a.scale,
            is_causal=True,
            window_size_left=-1 if a.window < 0 else a.window - 1,
            window_size_right=0,
            softcap=a.soft_cap,
        )

    return attend


def _load_2() -> Attend:
    forward = importlib.import_module("flash_attn_2_cuda").varlen_fwd  # all its arguments are positional

    def attend(a: Arguments) -> None:
        capacity = a.block_tables.shape[1] * a.key_cache.shape[1]
        lengths = a.query_start_loc, a.query_start_loc, a.seq_lens  # the second goes unread: keys are paged
        pages = None, a.block_tables, None  # left padding, tables, slopes
        longest = max(a.max_query_len, 2)  # for 1 it would write elsewhere than to `out`
        window = -1 if a.window < 0 else a.window - 1, 0
        dropout, zero_tensors, causal, return_softmax, generator = 0.0, False, True, False, None
        forward(
            *(a.query, a.key_cache, a.value_cache, a.out, *lengths, *pages, longest, capacity),
            *(dropout, a.scale, zero_tensors, causal, *window, a.soft_cap, return_softmax, generator),
        )

    return attend


VERSIONS = (
    Version("flash-attn-4", "flash_attn.cute", True, _obstacle_4, _load_4),
    Version("flash-attn 3", "flash_attn_interface", False, _obstacle_3, _load_3),
    Version("flash-attn 2", "flash_attn_2_cuda", False, _obstacle_2, _load_2),
)
PROVIDER = Provider(name="flash_attn", load=load, devices=frozenset({"cuda"}), dtypes=DTYPES)
