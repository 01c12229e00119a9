"""Every setting of a runtime, checked when given."""

from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import torch

from ..common.errors import ConfigError, UnknownSettingError, shown
from ..common.logging import get_logger
from ..common.names import refuse_unknown
from ..compiler.config import CompileConfig
from ..compiler.numerics import MAX_NUM_TOKENS, NUMERICS, Numerics
from ..models.pooling.spec import POOLINGS
from ..models.quantization.scheme import find_scheme
from .adapters.config import LoRAConfig, parse_lora
from .other_names import SETTINGS
from .parallel import ExecutorName, ParallelConfig, RayPlacement
from .speculation.config import Draft, Eagle, NGram, Speculation, parse_speculation
from .validation import check_name, check_type, integer, number

logger = get_logger("runtime")

LoadFormat = Literal["auto", "dummy"]
KVCacheDtype = Literal["auto", "fp8", "int8"]
PoolingSetting = Literal["auto", "last", "mean", "cls"]
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
FIELD_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "model": ((str, Path), "a folder, a .gguf file or a hub id"),
    "revision": ((str, NoneType), "a string or None"),
    "token": ((str, NoneType), "a string or None"),
    "dtype": ((str, torch.dtype), f"auto or one of {', '.join(DTYPES)}"),
    "device": ((str, torch.device), "auto, cpu or cuda"),
    "prefix_cache": ((bool,), "True or False"),
    "jump_forward": ((bool,), "True or False"),
    "record": ((str, Path, NoneType), "a file to write or None"),
    "compile": ((bool, CompileConfig), "True, False or a CompileConfig"),
    "attention": ((str,), "auto or the name of a provider"),
    "cache_dir": ((str, Path, NoneType), "a folder or None"),
    "allow_long_context": ((bool,), "True or False"),
    "require_warm": ((bool,), "True or False"),
    "speculative": ((NGram, Draft, Eagle, str, NoneType), "an NGram, a Draft, an Eagle, text or None"),
    "lora": ((LoRAConfig, str, NoneType), "a LoRAConfig, text or None"),
    "generation_defaults": ((bool,), "True or False"),
}
MOST = 2**63 - 1  # of any count; what memory allows is asked later
TOKENS_BESIDE_DECODE = 4096


@refuse_unknown(UnknownSettingError, SETTINGS)
@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """What the caller of Runtime.from_pretrained asked for; "auto" and None are settled for a model later.

    Raises ConfigError, naming the field, for a value that it cannot have.
    """

    model: str | Path
    """A folder of safetensors, a .gguf file, or the id of a model on a hub."""
    revision: str | None = None
    """Branch, tag or commit of a model on a hub."""
    token: str | None = None
    """Access token for a hub; otherwise the variable HF_TOKEN, or none."""
    tokenizer: Any = None
    """Another folder to take the tokenizer from; in Python also a tokenizer of transformers."""
    dtype: str | torch.dtype = "auto"
    """Of weights and KV cache; auto is the checkpoint's, where the device computes fast in it."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Of the KV cache; auto is dtype, fp8 and, on a CPU, int8 store keys and values in one byte each."""
    device: str | torch.device = "auto"
    """Where to run; auto is the first GPU if there is one."""
    tensor_parallel: int = 1
    """Ranks that share out every layer among them, its heads and its columns."""
    pipeline_parallel: int = 1
    """Stages that share out the layers, each of which is as many ranks as tensor_parallel says."""
    data_parallel: int = 1
    """Replicas of the model, each an engine in a process of its own, of a server or an AsyncRuntime: on GPUs
    of its own, or with its part of the cores and memory."""
    executor: ExecutorName = "auto"
    """Who runs the ranks; auto is this process where there is one, and a process each for more."""
    ray_placement: RayPlacement = "strict_pack"
    """How ranks lie on the nodes of a Ray cluster (executor ray): all on one (strict_pack), on few (pack), on
    many (spread), on one each (strict_spread)."""
    quantization: str | None = None
    """A scheme for projections by its name: int8, fp8, fp8_block, w4a16 and w8a16 (four and eight bits a
    weight), q4 or q8 (in blocks of 32 columns, on CPUs), or dense, which dequantizes a GGUF file."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together at most; otherwise what the checkpoint allows."""
    allow_long_context: bool = False
    """Whether max_model_len may pass what the checkpoint declares; its answers may be poor beyond."""
    max_num_seqs: int = 256
    """Requests that are computed at once, at most."""
    max_num_batched_tokens: int | None = None
    """Tokens of a step at most; otherwise 8192 on a GPU and 2048 on a CPU, of prompts about a second's."""
    prefill_chunk: int | None = None
    """Tokens of one prompt in a step at most; otherwise as many as the step has room for."""
    block_size: int | None = None
    """Tokens of a block of the KV cache; otherwise 16 on a CPU and 64 on a GPU."""
    num_kv_blocks: int | None = None
    """Blocks of the KV cache; otherwise as many as fit."""
    memory_fraction: float = 0.9
    """Part of the memory that weights and KV cache may take together."""
    prefix_cache: bool = True
    """Whether requests that begin alike share blocks of the KV cache."""
    jump_forward: bool = True
    """Whether tokens that a form leaves no choice of come several at once, without a step for each."""
    speculative: Speculation | str | None = None
    """Who drafts tokens that a step verifies beside the next one: ngram:3 drafts up to 3 out of the text."""
    pooling: PoolingSetting = "auto"
    """Which hidden states of a text make its vector; auto is what the checkpoint says. Others add vectors to
    a model that generates."""
    lora: LoRAConfig | str | None = None
    """Room for LoRA adapters, which are loaded while it serves: 8:32 is 8 in a step, of rank up to 32."""
    swap_bytes: int | None = None
    """Host memory for blocks of preempted requests; otherwise what a GPU's host has to spare, none on a
    CPU."""
    record: str | Path | None = None
    """A file for the decision log: every decision of the scheduler, for `lamina replay`."""
    compile: bool | CompileConfig = True
    """Whether to compile the model; a CompileConfig says how."""
    numerics: Numerics = "fast"
    """fast lets the compiler fuse; exact makes compiled and eager equal bit for bit."""
    attention: str = "auto"
    """Who computes attention; auto takes the fastest that runs here."""
    cache_dir: str | Path | None = None
    """Where compiled code and converted models are kept."""
    require_warm: bool = False
    """Whether to raise NotWarmError rather than compile, trace or build anything."""
    load_format: LoadFormat = "auto"
    """dummy takes random weights, for which config.json is enough."""
    generation_defaults: bool = True
    """Whether what a request leaves open is the checkpoint's own sampling, where it names any."""
    seed: int = 0
    """What requests without a seed draw their random numbers from, and dummy weights."""

    def __post_init__(self) -> None:
        for name, lowest in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("prefill_chunk", 1),
            ("block_size", 1),
            ("num_kv_blocks", 2),
            ("swap_bytes", 0),
        ):
            self._settle(name, _count(name, getattr(self, name), lowest))
        wanted, limit = "a signed 64-bit one", 2**63
        seed = integer(
            "seed", self.seed, wanted, low=-limit, high=limit - 1, optional=False, error=ConfigError
        )
        self._settle("seed", seed)
        name, wanted = "memory_fraction", "above 0, at most 1"
        fraction = number(
            name, self.memory_fraction, wanted, high=1.0, zero=False, optional=False, error=ConfigError
        )
        self._settle(name, fraction)
        for name, (types, wanted) in FIELD_TYPES.items():
            check_type(name, getattr(self, name), types, wanted)
        for name in ("tokenizer", *FIELD_TYPES):
            if isinstance(getattr(self, name), (str, Path)):
                check_name(name, getattr(self, name))
        if isinstance(self.speculative, str):
            self._settle("speculative", parse_speculation(self.speculative))
        if isinstance(self.lora, str):
            self._settle("lora", parse_lora(self.lora))
        if self.swap_bytes and not self.prefix_cache:
            got = f"swap_bytes is {self.swap_bytes} and prefix_cache False"
            raise ConfigError(f"{got}; wanted swap_bytes 0, or the cache, which knows what blocks hold")
        _check_choice("numerics", self.numerics, NUMERICS)
        if self.numerics == "exact" and self.batch_invariant:
            got = "numerics is 'exact' and batch_invariant True"
            raise ConfigError(f"{got}; wanted one of them: each asks for an order of its own in GEMMs' sums")
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8", "int8"))
        _check_choice("pooling", self.pooling, ("auto", *POOLINGS))
        if self.pooling != "auto" and self.speculative is not None:
            got = f"pooling is {self.pooling} and speculative {shown(self.speculative)}"
            raise ConfigError(f"{got}; wanted one of the two: drafts beside pooled prompts are not served")
        _check_choice("load_format", self.load_format, ("auto", "dummy"))
        find_scheme(self.quantization)
        self._settle("tensor_parallel", self.parallel.tensor_parallel)
        self._settle("pipeline_parallel", self.parallel.pipeline_parallel)
        self._settle("data_parallel", self.parallel.data_parallel)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens > MAX_NUM_TOKENS:
            got = f"max_num_batched_tokens is {self.max_num_batched_tokens}"
            raise ConfigError(f"{got}; wanted at most {MAX_NUM_TOKENS}, the bound of compiled pieces")

    @property
    def parallel(self) -> ParallelConfig:
        """Over how many ranks the model is spread, and who runs them."""
        return ParallelConfig(
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            data_parallel=self.data_parallel,
            executor=self.executor,
            ray_placement=self.ray_placement,
        )

    @property
    def compile_config(self) -> CompileConfig | None:
        """The compiler's settings, None for eager."""
        if isinstance(self.compile, CompileConfig):
            return self.compile
        return CompileConfig() if self.compile else None

    @property
    def batch_invariant(self) -> bool:
        """Whether logits are to have the same bits in any batch."""
        return isinstance(self.compile, CompileConfig) and self.compile.batch_invariant

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # only while being built: a checked value in its stored form


def _count(name: str, value: object, lowest: int) -> int | None:
    optional, wanted = name != "max_num_seqs", f"at least {lowest}"
    return integer(name, value, wanted, low=lowest, high=MOST, optional=optional, error=ConfigError)


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if not isinstance(value, (str, NoneType)) or value not in choices:
        wanted = " or ".join(str(choice) for choice in choices)
        raise ConfigError(f"{name} is {shown(value)}; wanted {wanted}")
