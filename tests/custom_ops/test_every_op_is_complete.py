"""An op is one folder name used for its code, its kernel and its tests; this walk keeps it so."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch

from lamina import custom_ops
from lamina.custom_ops._shared import registry
from lamina.custom_ops._shared.build import THREAD_POOL

ROOT = Path(__file__).resolve().parent.parent.parent
OPS = sorted(path.parent.name for path in (ROOT / "custom_ops").glob("*/op.py"))
KERNELS = sorted(path.parent.name for path in (ROOT / "custom_ops").glob("*/_cpu.py"))
CUDA_KERNELS = sorted(path.parent.name for path in (ROOT / "custom_ops").glob("*/_cuda.py"))
MARKERS = {"attention_site"}  # nothing to compute
TWINS = {  # what serves GPUs that the CUDA kernel does not; else Triton
    "act_and_mul_quantized": "composed",
    "add_rms_norm_quantized": "composed",
    "linear_silu_and_mul": "composed",
    "adjust_logits": "reference",
    "all_reduce": "group",
    "all_reduce_add_rms_norm": "composed",
    "keep_typical": "reference",
    "linear_w8a8": "composed",
    "mlp_w8a8": "composed",
    "rms_norm_quantized": "composed",
    "top_logprobs": "reference",
}

every_op = pytest.mark.parametrize("op", OPS)


def test_every_folder_is_an_op_and_is_exported() -> None:
    folders = {path.name for path in (ROOT / "custom_ops").iterdir() if path.is_dir()} - {
        "__pycache__",
        "_shared",
    }
    assert folders == set(OPS) == set(custom_ops.__all__)


@every_op
def test_its_public_function_is_documented_and_has_the_schemas_arguments(op: str) -> None:
    function = getattr(custom_ops, op)
    schema = getattr(torch.ops.lamina, op).default._schema
    assert function.__doc__
    assert list(inspect.signature(function).parameters) == [argument.name for argument in schema.arguments]


@every_op
def test_its_formula_has_its_name_and_its_arguments(op: str) -> None:
    if op in MARKERS:
        return
    formula = getattr(importlib.import_module(f"lamina.custom_ops.{op}.reference"), op)
    public = inspect.signature(getattr(custom_ops, op))
    assert list(inspect.signature(formula).parameters) == list(public.parameters)
    assert formula.__doc__
    assert registry.providers(op)[-1] == "reference"


@every_op
def test_it_has_a_test_file_that_runs_opcheck(op: str) -> None:
    text = (ROOT / "tests" / "custom_ops" / f"test_{op}.py").read_text()
    assert op in MARKERS or f"opcheck(torch.ops.lamina.{op}.default" in text


@pytest.mark.parametrize("op", KERNELS)
def test_its_kernel_has_an_algorithm_free_of_torch_an_entry_point_and_a_benchmark(op: str) -> None:
    for name in ("kernel.h", "cpu.cpp"):
        assert "torch" not in (ROOT / "csrc" / op / name).read_text()
    assert "cpu" in registry.providers(op)
    assert (ROOT / "benchmarks" / "ops" / f"{op}.py").exists()


def test_every_cpp_kernel_belongs_to_an_op() -> None:
    built = {path.parent.name for path in (ROOT / "csrc").glob("*/cpu.cpp")}
    assert sorted(built - {THREAD_POOL}) == KERNELS


@pytest.mark.parametrize("op", CUDA_KERNELS)
def test_its_cuda_kernel_is_free_of_torch_and_has_a_twin_elsewhere(op: str) -> None:
    for path in (ROOT / "csrc" / op).glob("*.cu*"):
        assert "torch/" not in path.read_text()
    assert (ROOT / "csrc" / op / "kernel.cuh").exists()
    twin, providers = TWINS.get(op, "triton"), registry.providers(op)
    if twin == "reference":  # the formula itself, which is there in any case
        assert (providers[0], providers[-1]) == ("cuda", twin)
        return
    assert (ROOT / "custom_ops" / op / f"_{twin}.py").exists()
    assert providers[:2] == ("cuda", twin)


def test_every_cuda_kernel_belongs_to_an_op() -> None:
    assert sorted(path.parent.name for path in (ROOT / "csrc").glob("*/cuda.cu")) == CUDA_KERNELS


@every_op
def test_only_declared_arguments_are_written(op: str) -> None:
    schema = getattr(torch.ops.lamina, op).default._schema
    written = {x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write}
    expected = {
        "adjust_logits": {"history", "out", "chunks"},
        "attention_site": {"out"},
        "copy_blocks": {"key_cache", "value_cache"},
        "keep_typical": {"logits"},
        "paged_attention": {"out"},
        "propose_ngram": {"out"},
        "rotary_and_write_kv_cache": {"key_cache", "value_cache"},
        "sample": {"out"},
        "write_kv_cache": {"key_cache", "value_cache"},
    }
    assert written == expected.get(op, set())
