"""The ops: one folder each, with its schema, its formula and its kernels."""

from .act_and_mul_quantized.op import act_and_mul_quantized
from .add_rms_norm.op import add_rms_norm
from .add_rms_norm_linear.op import add_rms_norm_linear
from .add_rms_norm_quantized.op import add_rms_norm_quantized
from .add_zero_centred_rms_norm.op import add_zero_centred_rms_norm
from .adjust_logits.op import adjust_logits
from .all_reduce.op import all_reduce
from .all_reduce_add_rms_norm.op import all_reduce_add_rms_norm
from .attention_site.op import attention_site
from .copy_blocks.op import copy_blocks
from .gelu_and_mul.op import gelu_and_mul
from .keep_typical.op import keep_typical
from .layer_norm.op import layer_norm
from .linear.op import linear
from .linear_blocks.op import linear_blocks
from .linear_int8.op import linear_int8
from .linear_lora.op import linear_lora
from .linear_silu_and_mul.op import linear_silu_and_mul
from .linear_w4a16.op import linear_w4a16
from .linear_w8a8.op import linear_w8a8
from .lora.op import lora
from .mlp_w8a8.op import mlp_w8a8
from .paged_attention.op import paged_attention
from .propose_ngram.op import propose_ngram
from .qk_norm.op import qk_norm
from .quantize_rows.op import quantize_rows
from .rms_norm.op import rms_norm
from .rms_norm_quantized.op import rms_norm_quantized
from .rotary_and_write_kv_cache.op import rotary_and_write_kv_cache
from .rotary_embedding.op import rotary_embedding
from .sample.op import sample
from .scaled_linear.op import scaled_linear
from .silu_and_mul.op import silu_and_mul
from .top_logprobs.op import top_logprobs
from .write_kv_cache.op import write_kv_cache
from .zero_centred_rms_norm.op import zero_centred_rms_norm

__all__ = [
    "act_and_mul_quantized",
    "add_rms_norm",
    "add_rms_norm_quantized",
    "add_rms_norm_linear",
    "add_zero_centred_rms_norm",
    "adjust_logits",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "attention_site",
    "copy_blocks",
    "gelu_and_mul",
    "keep_typical",
    "layer_norm",
    "linear",
    "linear_blocks",
    "linear_w8a8",
    "linear_int8",
    "linear_lora",
    "linear_silu_and_mul",
    "linear_w4a16",
    "lora",
    "mlp_w8a8",
    "paged_attention",
    "propose_ngram",
    "qk_norm",
    "quantize_rows",
    "rms_norm",
    "rms_norm_quantized",
    "rotary_and_write_kv_cache",
    "rotary_embedding",
    "sample",
    "scaled_linear",
    "silu_and_mul",
    "top_logprobs",
    "write_kv_cache",
    "zero_centred_rms_norm",
]
