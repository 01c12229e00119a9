"""Real code from Inductor: equal to eager, kept, found by other processes, made again when damaged."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lamina.common.errors import CompileError, NotWarmError
from lamina.common.store import Store
from lamina.compiler.compile import _explained, compile_program
from lamina.compiler.config import CompileConfig
from lamina.compiler.passes import pipeline
from lamina.compiler.passes.pipeline import PASS_NAMES
from lamina.compiler.torch_internals.torch_compat import toolchain

from .tiny import make_tiny

pytestmark = pytest.mark.timeout(600)
SIZES = (1, 2, 7, 8, 64)


def test_without_a_compiler_nothing_is_traced_before_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    stages = []
    with pytest.raises(CompileError, match=r"no C\+\+ compiler.* by compile=False$"):
        compile_program(
            make_tiny().program,
            CompileConfig(),
            "fast",
            Store(tmp_path),
            progress=lambda stage, *_: stages.append(stage),
        )
    assert stages == []


def test_a_full_disk_is_told_from_code_that_does_not_compile():
    said = "fatal error: cannot write PCH file: No space left on device"
    with (
        pytest.raises(CompileError, match=f"piece 1 of 3.*{said}; make room.*cache_dir"),
        _explained("piece 1 of 3"),
    ):
        raise RuntimeError(f"C++ compile error\n{said}")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _compile(tiny, store, *, numerics="fast", config=None, **options):
    return compile_program(tiny.program, config or CompileConfig(), numerics, store, **options)


def _run(tiny, compiled, num_tokens):
    with torch.no_grad():
        ids, positions = tiny.tokens(num_tokens)
        return compiled.plan.bind(tiny.weights, torch.device("cpu"))(ids, positions, tiny.attend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_is_eager_bit_for_bit_at_every_size_with_one_code_object(shared_store, dtype):
    tiny = make_tiny(dtype=dtype, exact=True)
    compiled = _compile(tiny, shared_store, numerics="exact")
    for num_tokens in SIZES:
        assert torch.equal(_run(tiny, compiled, num_tokens), tiny.eager(num_tokens)), num_tokens
    assert compiled.num_compiled == len(compiled.plan.pieces) == 3


def pairwise(names):
    """Few subsets in which any two names are both there, the one or the other alone, and both missing."""
    members = list(itertools.combinations(range(5), 3))  # of the subsets; no two names are in the same ones
    assert len(names) <= len(members)
    chosen = [[name for name, own in zip(names, members, strict=False) if row in own] for row in range(5)]
    return [(), *map(tuple, chosen)]


EXACT_PASSES = [step.name for step in pipeline.select(None, "exact")]


def test_the_subsets_hold_every_pair_of_passes_in_all_four_ways():
    for pair in itertools.combinations(EXACT_PASSES, 2):
        ways = {tuple(name in subset for name in pair) for subset in pairwise(EXACT_PASSES)}
        assert len(ways) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("passes", pairwise(EXACT_PASSES), ids=lambda names: f"{len(names)} passes")
def test_exact_is_eager_bit_for_bit_whichever_passes_run(shared_store, passes, dtype):
    tiny = make_tiny(dtype=dtype, exact=True)
    compiled = _compile(tiny, shared_store, numerics="exact", config=CompileConfig(passes=passes))
    assert torch.equal(_run(tiny, compiled, 7), tiny.eager(7))


def test_fast_is_eager_to_rounding_with_fused_kernels_in_every_piece(shared_store):
    tiny = make_tiny()
    compiled = _compile(tiny, shared_store)
    for num_tokens in SIZES:
        torch.testing.assert_close(
            _run(tiny, compiled, num_tokens), tiny.eager(num_tokens), rtol=1e-5, atol=1e-5
        )
    for piece in compiled.plan.pieces:
        joined = {gemm.kind for gemm in piece.artifact.gemms} - {"linear"}
        assert piece.artifact.kernels or joined, "a piece without a fused kernel"
        assert "torch.ops.lamina" not in shared_store.get(piece.artifact.source).decode()


def test_the_number_of_pieces_does_not_grow_with_depth(shared_store):
    deep = _compile(make_tiny(num_layers=5), shared_store)
    assert len(deep.plan.pieces) == 3
    assert deep.num_pieces == 6
    assert deep.num_compiled == 0, "pieces of a shallower model of the same shape were not found again"


def test_a_changed_model_is_another_plan_and_the_old_one_is_still_there(shared_store):
    first = _compile(make_tiny(), shared_store)
    other = _compile(make_tiny(rms_norm_eps=1e-3), shared_store)
    assert other.num_compiled > 0
    assert "model" in other.miss
    torch.testing.assert_close(
        _run(make_tiny(rms_norm_eps=1e-3), other, 7),
        make_tiny(rms_norm_eps=1e-3).eager(7),
        rtol=1e-5,
        atol=1e-5,
    )
    again = _compile(make_tiny(), shared_store)
    assert again.num_compiled == 0
    assert torch.equal(_run(make_tiny(), again, 7), _run(make_tiny(), first, 7))


@pytest.mark.parametrize("off", ["canonicalise", "residual_barrier", "add_rms_norm", "silu_and_mul", "lower"])
def test_every_pass_can_be_left_out(shared_store, off):
    config = CompileConfig(passes=tuple(name for name in PASS_NAMES if name != off))
    tiny = make_tiny()
    compiled = _compile(tiny, shared_store, config=config)
    torch.testing.assert_close(_run(tiny, compiled, 7), tiny.eager(7), rtol=1e-5, atol=1e-5)


def test_where_only_loading_is_allowed_an_empty_store_is_an_error(tmp_path):
    with pytest.raises(NotWarmError, match="no plan"):
        _compile(make_tiny(), Store(tmp_path), require_warm=True)


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "missing"])
def test_a_damaged_object_is_made_again_and_the_output_is_right(shared_store, damage):
    tiny = make_tiny()
    compiled = _compile(tiny, shared_store)
    artifact = compiled.plan.pieces[0].artifact  # the first has a kernel of Inductor's on every device
    for digest in (artifact.source, next(iter(artifact.kernels.values()))):
        path = shared_store.root / "objects" / digest[:2] / digest[2:]
        content = path.read_bytes()
        path.unlink()  # another file in its place: this process still runs the old one
        if damage != "missing":
            path.write_bytes(content[:100] if damage == "truncated" else b"nonsense")
        again = _compile(tiny, shared_store)
        assert again.num_compiled == 1
        torch.testing.assert_close(_run(tiny, again, 7), tiny.eager(7), rtol=1e-5, atol=1e-5)
    assert _compile(tiny, shared_store).num_compiled == 0, "it was not repaired"


SCRIPT = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from tests.compiler import tiny
from lamina.common.store import Store
from lamina.compiler.compile import compile_program
from lamina.compiler.config import CompileConfig
if build_folder := sys.argv[3]:  # where the test's own process has built headers before
    Store.build_folder = lambda store: Path(build_folder)
model = tiny.make_tiny()
compiled = compile_program(model.program, CompileConfig(), "fast", Store(sys.argv[1]))
ids, positions = model.tokens(7)
with torch.no_grad():
    result = compiled.plan.bind(model.weights, torch.device("cpu"))(ids, positions, model.attend)
imported = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
print(json.dumps([compiled.num_compiled, compiled.num_loaded, imported, result.sum().item()]))
"""


def _start(root, build_folder=""):
    root_folder = Path(__file__).resolve().parent.parent.parent
    environment = os.environ | {"PYTHONPATH": str(root_folder / "src"), "PYTHONHASHSEED": "random"}
    command = [sys.executable, "-c", SCRIPT, str(root), str(root_folder), str(build_folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_another_process_compiles_nothing_and_imports_no_compiler(shared_store):
    tiny = make_tiny()
    compiled = _compile(tiny, shared_store)
    process = _start(shared_store.root)
    output, _ = process.communicate()
    num_compiled, num_loaded, imported, total = json.loads(output)
    assert (num_compiled, num_loaded, imported) == (0, 3, [])
    assert total == _run(tiny, compiled, 7).sum().item()


@pytest.mark.parametrize("count, is_cold", [(2, False), pytest.param(8, True, marks=pytest.mark.long)])
def test_processes_that_start_at_once_compile_each_piece_once(tmp_path, build_folder, count, is_cold):
    processes = [_start(tmp_path / "store", "" if is_cold else build_folder) for _ in range(count)]
    results = [json.loads(process.communicate()[0]) for process in processes]
    assert sorted(result[0] for result in results) == [0] * (count - 1) + [3]
    assert len({result[3] for result in results}) == 1
    assert not list((tmp_path / "store" / "temporary").iterdir())


def test_compiling_leaves_the_process_as_it_was(tmp_path):
    before = dict(os.environ), torch.get_default_dtype(), os.getcwd(), torch.get_num_threads()
    _compile(make_tiny(intermediate_size=96), Store(tmp_path))
    assert (dict(os.environ), torch.get_default_dtype(), os.getcwd(), torch.get_num_threads()) == before
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    assert not children.exists() or not children.read_text().split()


def test_the_toolchain_stamp_names_what_code_depends_on_and_no_place():
    stamp = toolchain(torch.device("cpu"))
    assert torch.__version__ in stamp["torch"]
    assert "isa" in stamp
    assert str(Path.home()) not in json.dumps(stamp)
