"""lamina::attention_site, the mark that attention leaves in a captured graph; the graph is cut there."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...common.errors import UnsupportedError
from .._shared.library import declare_op, no_result


def attention_site(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    k: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor,  # like k, its strides may differ
    out: Tensor,  # like q, written in place
    layer: int,
    cos: Tensor | None = None,  # [num_tokens, head_dim / 2]: q and k are still to be rotated by these angles
    sin: Tensor | None = None,  # like cos
) -> None:
    """Stands for attention of one layer while a model is captured; it computes nothing and cannot be run."""
    torch.ops.lamina.attention_site.default(q, k, v, out, layer, cos, sin)


def _refuse(device_type: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any) -> NoReturn:
        raise UnsupportedError(
            "attention_site only marks where a captured graph is cut; run the model with an attend function"
        )

    return refuse


declare_op(
    "attention_site(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer,"
    " Tensor? cos=None, Tensor? sin=None) -> ()",
    fake=no_result,
    implement=_refuse,
)
