"""Scales of keys and values that a checkpoint has for a KV cache in float8, by any of their names."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ....common.errors import LoadError

LAYER = r"model\.layers\.(\d+)\.self_attn\."
OWN = re.compile(LAYER + r"(?:attn\.|qkv_proj\.)?([kv])_scale")
OF_PROJECTION = re.compile(LAYER + r"([kv])_proj\.(?:[kv]_scale|output_scale)")
OF_BOTH = re.compile(LAYER + r"(?:attn\.)?kv_scale")
NOT_USED = re.compile(LAYER + r"(?:attn\.)?(?:q_proj\.)?(?:q_scale|prob_scale|output_scale)")


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is a scale of attention, used or not."""
    return bool(targets(name)) or NOT_USED.fullmatch(name) is not None


def targets(name: str) -> tuple[str, ...]:
    """The scales that a tensor is, as "layers.3.k_scale"."""
    both = OF_BOTH.fullmatch(name)
    if both:
        return (f"layers.{both[1]}.k_scale", f"layers.{both[1]}.v_scale")
    one = OWN.fullmatch(name) or OF_PROJECTION.fullmatch(name)
    return (f"layers.{one[1]}.{one[2]}_scale",) if one else ()


def kv_scales(found: Iterable[tuple[str, Tensor]], num_kv_heads: int) -> Mapping[str, Tensor]:
    """Each scale by its name, float32 [1] or [kv_heads]: a stored number stands for as many times the scale.

    LoadError, naming the tensor, for one of another size, not finite or not above zero, or given twice.
    """
    scales: dict[str, Tensor] = {}
    for name, tensor in found:
        scale = tensor.to(torch.float32).reshape(-1)
        if scale.shape[0] not in (1, num_kv_heads):
            wanted = f"one scale, or one for each of {num_kv_heads} heads"
            raise LoadError(f"{name} has shape {list(tensor.shape)}; wanted {wanted}")
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise LoadError(f"{name} is {scale.tolist()[:4]}; wanted numbers above zero")
        for target in targets(name):
            if target in scales and not torch.equal(scales[target], scale):
                raise LoadError(f"{name} differs from another tensor that is {target} too")
            scales[target] = scale
    return scales
