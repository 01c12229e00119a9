"""Whatever bytes lie in the tensors of a module: its weights are finite, or it is refused by its name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lamina.common.errors import LaminaError, LoadError
from lamina.models.checkpoints.quantized.formats import Format

from .test_damage import load
from .test_dialects import DIALECTS, MODELOPT
from .test_formats import MODULE, format_of, kept, normal
from .writers import PACKED, save

SHAPE = (32, 128)
FILLS = (0x00, 0x7F, 0x80, 0xFF)  # 0x7f and 0xff are e4m3's NaN


def bytes_of(tensor: Tensor, fill: int | None, seed: int) -> Tensor:
    """A tensor like the one given, of a byte or of random ones."""
    size = tensor.numel() * tensor.element_size()
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    if fill is not None:
        made.fill_(fill)
    return made.view(tensor.dtype).reshape(tensor.shape)


def outcome_of(form: Format, tensors: dict[str, Tensor]) -> str:
    try:
        weights = kept(form, tensors, SHAPE)
    except LaminaError as error:
        return "refused" if MODULE in str(error) else f"refused without a name: {error}"
    return "finite" if bool(weights.isfinite().all()) else "not finite"


@pytest.mark.parametrize("name", DIALECTS)
def test_any_bytes_are_finite_weights_or_refused_by_name(name: str) -> None:
    dialect = DIALECTS[name]
    config = dialect.config or {"quant_method": "modelopt", **MODELOPT}
    form = format_of(config)
    tensors, _ = dialect.write(normal(SHAPE, 3) + 0.1)
    outcomes = set()
    for key, tensor in tensors.items():
        for number, fill in enumerate((*FILLS, None, None, None)):
            damaged = tensors | {key: bytes_of(tensor, fill, number)}
            outcomes.add(outcome_of(form, damaged))
    assert outcomes == {"refused", "finite"}


def test_scales_beyond_the_dtype_of_the_runtime_are_refused(source: Path, tmp_path: Path) -> None:
    folder, _ = save(tmp_path, source, PACKED)
    held = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    held[name] = held[name].float()
    held[name][3, 1] = 1e6
    save_file(held, folder / "model.safetensors")
    load(folder, torch.bfloat16)
    with pytest.raises(
        LoadError, match=r"layers\.1\.gate_up has scales that are beyond torch\.float16; use a"
    ):
        load(folder, torch.float16)
