"""lamina::lora and adapters of a runtime on a GPU."""

from pathlib import Path

import pytest
import torch

from lamina import LoRAConfig, Runtime, SamplingParams
from lamina.custom_ops._shared import registry
from lamina.custom_ops.lora.reference import lora as formula

from ..adapters import write_adapter, write_merged
from ..custom_ops.test_lora import operands

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
PROMPTS = [[1, 5, 9, 20], [7, 8, 200, 31, 4, 4, 19], [3] * 21]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(33,), (4096, 1024, 1024), (300, 7)], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 16, 64])
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_triton_computes_what_the_formula_says(
    dtype: torch.dtype, rows: tuple[int, ...], rank: int, num_tokens: int
) -> None:
    given = operands(num_tokens, 577, rows, dtype, rank=rank)
    call = registry.select("lora", device=DEVICE, dtype=dtype, provider="triton").call
    found = call(*[one.to(DEVICE) if isinstance(one, torch.Tensor) else one for one in given.each()])
    wide = {name: getattr(given, name).double() for name in ("y", "x", "a", "b", "scales")}
    exact = formula(*given.each(**wide))
    sizes = formula(*given.each(**{name: value.abs() for name, value in wide.items()}))
    allowed = exact.abs() * torch.finfo(dtype).eps / 2 + sizes * 2e-6
    assert ((found.cpu().double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("compile_", [False, True])
def test_adapters_are_served_as_merged_models_are(compile_: bool, tiny_folder: Path, tmp_path: Path) -> None:
    """Through CUDA graphs of either kind of step, in float32, where nothing is near enough to tie."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {"dtype": "float32", "compile": compile_, "num_kv_blocks": 64, "max_num_seqs": 8}
    folders = [write_adapter(tiny_folder, tmp_path / f"a{seed}", seed=seed) for seed in range(3)]
    merged = [write_merged(tiny_folder, one, tmp_path / f"m{n}") for n, one in enumerate(folders)]

    def answers(runtime: Runtime, **options: str) -> list[tuple[int, ...]]:
        return [one.outputs[0].token_ids for one in runtime.generate(PROMPTS, params, **options)]

    wanted = []
    for folder in [tiny_folder, *merged]:
        with Runtime.from_pretrained(folder, **settings) as runtime:
            wanted.append(answers(runtime))
    lora = LoRAConfig(max_loras=2, max_lora_rank=8)
    with Runtime.from_pretrained(tiny_folder, lora=lora, **settings) as runtime:
        for number, folder in enumerate(folders):
            runtime.load_adapter(f"a{number}", folder)
        for _ in range(2):
            assert answers(runtime) == wanted[0]
            for number in range(3):
                assert answers(runtime, adapter=f"a{number}") == wanted[number + 1]
