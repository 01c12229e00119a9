"""Keywords of the public entry points, so that type checkers and editors know each by its name and type.

A function's **keywords need a TypedDict, which cannot be derived from the config that they become; a test
holds each to its config, field by field. What a field means and defaults to is said there.
"""

from pathlib import Path
from typing import Any, TypedDict

import torch

from ..compiler.config import CompileConfig
from ..compiler.numerics import Numerics
from .adapters.config import LoRAConfig
from .config import KVCacheDtype, LoadFormat, PoolingSetting
from .parallel import ExecutorName, RayPlacement
from .speculation.config import Speculation


class RuntimeSettings(TypedDict, total=False):
    """The fields of RuntimeConfig but the model, which comes first and has no keyword."""

    revision: str | None
    token: str | None
    tokenizer: Any
    dtype: str | torch.dtype
    kv_cache_dtype: KVCacheDtype
    device: str | torch.device
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    executor: ExecutorName
    ray_placement: RayPlacement
    quantization: str | None
    max_model_len: int | None
    allow_long_context: bool
    max_num_seqs: int
    max_num_batched_tokens: int | None
    prefill_chunk: int | None
    block_size: int | None
    num_kv_blocks: int | None
    memory_fraction: float
    prefix_cache: bool
    jump_forward: bool
    speculative: Speculation | str | None
    pooling: PoolingSetting
    lora: LoRAConfig | str | None
    swap_bytes: int | None
    record: str | Path | None
    compile: bool | CompileConfig
    numerics: Numerics
    attention: str
    cache_dir: str | Path | None
    require_warm: bool
    load_format: LoadFormat
    generation_defaults: bool
    seed: int


class RequestSettings(TypedDict, total=False):
    """The fields of RequestOptions."""

    priority: int
    timeout: float | None
    cache_salt: str
    adapter: str | None


class LLMSettings(TypedDict, total=False):
    """vLLM's settings that its LLM takes here beside those it names itself."""

    tokenizer: str | None
    dtype: str | torch.dtype
    quantization: str | None
    revision: str | None
    seed: int | None
    block_size: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    load_format: LoadFormat
    enable_prefix_caching: bool | None
    num_gpu_blocks_override: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    distributed_executor_backend: str | None
    trust_remote_code: bool
    tokenizer_mode: str
    tokenizer_revision: str | None
    skip_tokenizer_init: bool
    enable_chunked_prefill: bool | None
    disable_log_stats: bool
    disable_custom_all_reduce: bool
    kv_cache_dtype: str
    cpu_offload_gb: float
    swap_space: float
    enable_lora: bool
    speculative_config: dict[str, Any] | None
    compilation_config: int | dict[str, Any] | None
    hf_overrides: dict[str, Any] | None
    logits_processors: list[Any] | None
    runner: str
    convert: str
    task: str
