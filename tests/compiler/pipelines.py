"""The passes over a piece as on a device on which every op has kernels of its own, or none has."""

import torch

from lamina.compiler.passes import pipeline
from lamina.compiler.passes.add_rms_norm_linear import add_rms_norm_linear_pass
from lamina.compiler.passes.all_reduce_add_rms_norm import all_reduce_add_rms_norm_pass
from lamina.compiler.passes.gated_w4a16 import gated_w4a16_pass
from lamina.compiler.passes.linear import linear_pass
from lamina.compiler.passes.linear_lora import linear_lora_pass
from lamina.compiler.passes.linear_silu_and_mul import linear_silu_and_mul_pass
from lamina.compiler.passes.mlp_w8a8 import mlp_w8a8_pass
from lamina.compiler.passes.providers import Choice
from lamina.compiler.passes.qk_norm import qk_norm_pass
from lamina.compiler.passes.quantized import quantized_gate_pass, quantized_norm_pass


def taken(op: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The choice of a device on which every op has kernels of its own, for every dtype."""
    return Choice(is_op=True, reason="as on a GPU")


def left(op: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The choice of a device on which no op has kernels of its own."""
    return Choice(is_op=False, reason="as on a device without kernels")


LINEAR, ADD_RMS_NORM_LINEAR = linear_pass(taken), add_rms_norm_linear_pass(taken)
QK_NORM, NORM_QUANTIZED, GATE_QUANTIZED = (
    qk_norm_pass(taken),
    quantized_norm_pass(taken),
    quantized_gate_pass(taken),
)
GATED_W4A16, MLP_W8A8 = gated_w4a16_pass(taken), mlp_w8a8_pass(taken)
LINEAR_SILU_AND_MUL = linear_silu_and_mul_pass(taken)
LINEAR_LORA = linear_lora_pass(taken)
ALL_REDUCE_ADD_RMS_NORM = all_reduce_add_rms_norm_pass(taken)
TAKING = (
    ALL_REDUCE_ADD_RMS_NORM,
    LINEAR,
    ADD_RMS_NORM_LINEAR,
    QK_NORM,
    NORM_QUANTIZED,
    GATE_QUANTIZED,
    MLP_W8A8,
    GATED_W4A16,
    LINEAR_SILU_AND_MUL,
    LINEAR_LORA,
)
AS_ON_A_GPU = {step.name: step for step in TAKING}
CHOOSING = (
    *(linear_pass, add_rms_norm_linear_pass, qk_norm_pass),
    *(quantized_norm_pass, quantized_gate_pass, mlp_w8a8_pass, gated_w4a16_pass),
    *(all_reduce_add_rms_norm_pass, linear_silu_and_mul_pass, linear_lora_pass),
)
WITHOUT_KERNELS = {step.name: step for step in (make(left) for make in CHOOSING)}
PIPELINE = tuple(AS_ON_A_GPU.get(step.name, step) for step in pipeline.of_scope(pipeline.PIPELINE, "piece"))


LOWERED = tuple(
    WITHOUT_KERNELS.get(step.name, step) for step in pipeline.of_scope(pipeline.PIPELINE, "piece")
)
