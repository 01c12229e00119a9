"""The ops: one folder each, with its schema, its formula and its kernels."""

from .add_rms_norm.op import add_rms_norm
from .add_rms_norm_linear.op import add_rms_norm_linear
from .add_zero_centred_rms_norm.op import add_zero_centred_rms_norm
from .adjust_logits.op import adjust_logits
from .attention_site.op import attention_site
from .copy_blocks.op import copy_blocks
from .gelu_and_mul.op import gelu_and_mul
from .keep_typical.op import keep_typical
from .layer_norm.op import layer_norm
from .linear.op import linear
from .linear_int8.op import linear_int8
from .paged_attention.op import paged_attention
from .qk_norm.op import qk_norm
from .rms_norm.op import rms_norm
from .rotary_and_write_kv_cache.op import rotary_and_write_kv_cache
from .rotary_embedding.op import rotary_embedding
from .sample.op import sample
from .silu_and_mul.op import silu_and_mul
from .top_logprobs.op import top_logprobs
from .write_kv_cache.op import write_kv_cache
from .zero_centred_rms_norm.op import zero_centred_rms_norm

__all__ = [
    "add_rms_norm",
    "add_rms_norm_linear",
    "adjust_logits",
    "add_zero_centred_rms_norm",
    "attention_site",
    "copy_blocks",
    "gelu_and_mul",
    "keep_typical",
    "layer_norm",
    "linear",
    "linear_int8",
    "paged_attention",
    "qk_norm",
    "rms_norm",
    "rotary_and_write_kv_cache",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "top_logprobs",
    "write_kv_cache",
    "zero_centred_rms_norm",
]
