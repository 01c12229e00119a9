"""Compiling leaves a process as it was, whatever was set in it and whoever else compiles there."""

import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from lamina.common.errors import CompileError
from lamina.common.store import Store
from lamina.compiler.capture.capture import capture
from lamina.compiler.compile import Program, compile_program
from lamina.compiler.config import CompileConfig
from lamina.compiler.torch_internals import torch_compat, torch_section
from lamina.compiler.torch_internals.torch_section import as_written, compiling, neutral

CPU = torch.device("cpu")
WEIGHTS = {"embedding": torch.linspace(0.1, 1.0, 80).reshape(10, 8)}
TABLE = {"embedding": ((10, 8), torch.float32)}
IDS, POSITIONS = torch.tensor([1, 5], dtype=torch.int32), torch.arange(2, dtype=torch.int32)


def half(weights, ids, positions, attend):
    return F.embedding(ids, weights["embedding"]) / 2


def third(weights, ids, positions, attend):
    return F.embedding(ids, weights["embedding"]) / 3


def log(weights, ids, positions, attend):
    return (F.embedding(ids, weights["embedding"]) - 0.5).log()


def build(forward, store):
    program = Program(forward=forward, parameters=TABLE, device=CPU)
    return compile_program(program, CompileConfig(verify=forward is not log), "fast", store)


def run(compiled):
    with torch.no_grad():
        return compiled.plan.bind(WEIGHTS, CPU)(IDS, POSITIONS, lambda *_: None)


def trace(forward):
    return capture(forward, torch_compat.fake_tensors(TABLE, CPU), CPU)


class Counting:
    """A backend of a user's torch.compile that counts what it is asked to compile."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, inputs):
        self.count += 1
        return module.forward


def state_of_the_process():
    """What a user could find changed."""
    from torch._dynamo import config as dynamo
    from torch._dynamo.eval_frame import cached_backends
    from torch._inductor import async_compile, codecache, config

    pool = async_compile.AsyncCompile.__dict__
    return (
        dict(os.environ),
        list(warnings.filters),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        dynamo.get_config_copy(),
        config.get_config_copy(),
        set(cached_backends),
        [pool[name] for name in ("pool", "use_process_pool", "process_pool")],
        [vars(codecache)[name] for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR", "_precompile_header")],
        threading.active_count(),
    )


@pytest.fixture(scope="module", autouse=True)
def imported():
    """What is imported once and stays."""
    with compiling():
        pass


@pytest.fixture
def users():
    """A function of a user's own, compiled, which must never be compiled again."""
    backend = Counting()
    compiled = torch.compile(lambda x: x * 2 + 1, backend=backend)
    compiled(torch.ones(3))
    assert backend.count == 1
    yield compiled
    compiled(torch.ones(3))
    assert backend.count == 1, "the user's function was compiled again"


def test_a_users_compiled_functions_stay_compiled_and_nothing_of_a_trace_is_left(users):
    before = state_of_the_process()
    counted = {name: dict(counter) for name, counter in torch._dynamo.utils.counters.items()}
    for forward in (half, third, half):
        trace(forward)
    assert state_of_the_process() == before
    assert {name: dict(counter) for name, counter in torch._dynamo.utils.counters.items()} == counted


def test_many_traces_of_one_program_meet_no_limit_of_dynamos():
    for count in range(12):
        captured = trace(lambda weights, ids, positions, attend, k=count: half(weights, ids, 0, 0) * k)
        assert f"* {count}" in captured.graph.code


def fails(weights, ids, positions, attend):
    raise KeyError("no such thing")


def _fail_in_the_middle(folder, error):
    with compiling(), torch_compat._building_in(folder):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
        raise error("in the middle")


@pytest.mark.parametrize("error", [KeyboardInterrupt, CompileError, ValueError])
def test_whatever_ends_it_the_process_is_as_it_was(users, tmp_path, error):
    before = state_of_the_process()
    with pytest.raises(error, match="in the middle"):
        _fail_in_the_middle(tmp_path, error)
    assert state_of_the_process() == before
    with pytest.raises(CompileError):
        trace(fails)
    assert state_of_the_process() == before


def test_settings_of_inductor_change_neither_code_nor_key(tmp_path):
    """A logarithm of what is negative is nan, whatever a user allows Inductor to assume."""
    from torch._inductor import config

    with config.patch({"cpp.enable_unsafe_math_opt_flag": True, "cpp.simdlen": 0, "epilogue_fusion": False}):
        first = build(log, Store(tmp_path))
        assert config.cpp.enable_unsafe_math_opt_flag
    expected = log(WEIGHTS, IDS, POSITIONS, None)
    assert torch.isnan(expected).any()
    torch.testing.assert_close(run(first), expected, equal_nan=True)
    again = build(log, Store(tmp_path))
    assert again.num_compiled == 0
    with compiling():
        plain = torch_compat.inductor_config()
    with config.patch({"cpp.enable_unsafe_math_opt_flag": True, "max_fusion_size": 1}), compiling():
        assert torch_compat.inductor_config() == plain


STEERED = """
import torch
from lamina.compiler.torch_internals import torch_compat
from lamina.compiler.torch_internals.torch_section import compiling
with compiling():
    print(torch_compat.inductor_config())
"""


def test_variables_that_steer_inductor_change_no_key():
    def hash_with(**variables):
        command = [sys.executable, "-W", "ignore", "-c", STEERED]
        return subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=True
        ).stdout

    steered = hash_with(
        TORCHINDUCTOR_FREEZING="1",
        TORCHINDUCTOR_MAX_AUTOTUNE="1",
        TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG="1",
    )
    with compiling():
        assert steered.strip() == torch_compat.inductor_config()


SWITCHES = {
    "TORCHDYNAMO_DISABLE": {"TORCHDYNAMO_DISABLE": "1"},
    "TORCH_COMPILE_DISABLE": {"TORCH_COMPILE_DISABLE": "1"},
}


@pytest.mark.parametrize("variables", SWITCHES.values(), ids=SWITCHES)
def test_a_user_who_switches_his_own_compiling_off_does_not_mislead_ours(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "/ 2" in trace(half).graph.code
    assert dict(os.environ).items() >= variables.items()


FIRST = """
import os
from lamina.common.store import Store
from tests.compiler.test_process import build, half
before = dict(os.environ)
print(build(half, Store({folder!r})).num_compiled)
print({{name: value for name, value in os.environ.items() if before.get(name) != value}})
"""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", ["", "a job of the user's"])
def test_the_first_compilation_leaves_neither_temporary_files_nor_variables(tmp_path, job):
    """Dynamo is imported, the program captured and built: torch would make and fill a folder each time."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", FIRST.format(folder=str(tmp_path / "store"))]
    variables = {"TMPDIR": str(temporary), "TORCH_COMPILE_JOB_ID": job} if job else {"TMPDIR": str(temporary)}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1", "{}"]
    assert list(temporary.iterdir()) == []


def test_a_user_who_searches_for_a_fault_of_torchs_compilers_does_not_mislead_ours(monkeypatch, tmp_path):
    from torch._inductor.compiler_bisector import CompilerBisector

    (tmp_path / "bisect").mkdir()
    (tmp_path / "bisect" / "bisect_status.txt").write_text("backend=eager")
    monkeypatch.setattr(CompilerBisector, "in_process_cache", str(tmp_path))
    assert CompilerBisector.get_backend() == "eager"
    assert "/ 2" in trace(half).graph.code
    assert CompilerBisector.get_backend() == "eager"


@pytest.mark.parametrize("stance", ["force_eager", "fail_on_recompile", "eager_on_recompile"])
def test_a_stance_of_torchs_compiler_is_the_users_alone(stance):
    with torch.compiler.set_stance(stance):
        assert "/ 2" in trace(half).graph.code


def test_settings_of_dynamo_do_not_count():
    from torch._dynamo import config

    with config.patch(disable=True, recompile_limit=1, suppress_errors=True, specialize_int=False):
        assert "/ 2" in trace(half).graph.code
        assert config.disable


@pytest.mark.long
def test_two_threads_with_two_folders_and_a_user_who_compiles_meanwhile(tmp_path, users):
    """Six compilations in two threads while a third compiles with Inductor, and one warm load."""
    before = state_of_the_process()[:-1]
    failures = []

    def of_the_user(count):
        function = torch.compile(lambda x: (x * count).sin())
        torch.testing.assert_close(function(torch.ones(4)), (torch.ones(4) * count).sin())

    def ours(folder):
        for forward in (half, third, log):
            compiled = build(forward, Store(tmp_path / folder))
            expected = forward(WEIGHTS, IDS, POSITIONS, None)
            torch.testing.assert_close(run(compiled), expected, equal_nan=True)

    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(ours, "a"),
            pool.submit(ours, "b"),
            *(pool.submit(of_the_user, n) for n in (2, 3)),
        ]
        failures = [job.exception() for job in jobs if job.exception() is not None]
    assert not failures
    after = state_of_the_process()[:-1]
    assert {
        k: v for k, v in after[0].items() if not k.startswith("TORCHINDUCTOR") and "DATA_PTR" not in k
    } == {k: v for k, v in before[0].items() if not k.startswith("TORCHINDUCTOR") and "DATA_PTR" not in k}
    assert str(tmp_path) not in str(after[0])
    assert after[7:] == before[7:]


def test_a_compiled_function_runs_in_another_thread_while_ours_traces(users):
    def theirs():
        return users(torch.ones(3)).tolist()

    with ThreadPoolExecutor(1) as pool:

        class Calling(torch.nn.Module):
            def forward(self, x):
                self.found = pool.submit(theirs).result()
                return x

        module = Calling()
        with compiling():
            torch.fx.symbolic_trace(module)
    assert module.found == [3.0] * 3


def test_what_a_caller_set_is_neutral_inside_and_as_it_was_outside():
    import numpy as np

    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.device("meta"),
            np.errstate(all="raise"),
            torch.inference_mode(),
        ):
            for _ in range(2):
                with neutral(), neutral():
                    assert torch.ones(2).dtype == torch.float32
                    assert torch.ones(2).device == CPU
                    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
                    assert not torch.are_deterministic_algorithms_enabled()
                    assert np.geterr()["invalid"] == "warn"
                    with compiling():
                        assert not torch.is_inference_mode_enabled()
                assert torch.ones(2).dtype == torch.float64
                assert torch.ones(2).device.type == "meta"
                assert torch.is_autocast_enabled("cpu")
                assert torch.are_deterministic_algorithms_enabled()
                assert torch.is_deterministic_algorithms_warn_only_enabled()
                assert np.geterr()["invalid"] == "raise"
                assert torch.is_inference_mode_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_the_default_dtype_is_the_last_ones_to_set_back():
    """Two threads overlap: whoever comes out last leaves it as the user had it."""
    torch.set_default_dtype(torch.float64)
    try:
        first = neutral()
        first.__enter__()
        second = neutral()  # which finds nothing to set: the first has
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.get_default_dtype() == torch.float32
        second.__exit__(None, None, None)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_inside_a_users_compiled_function_ours_runs_as_it_is_written():
    frames = []

    @as_written
    def ours(x):
        frames.append(torch.compiler.is_compiling())
        return torch.from_numpy(x.numpy() + 1)

    backend = Counting()

    @torch.compile(backend=backend)
    def theirs(x):
        return ours(x * 2) * 3

    assert theirs(torch.ones(2)).tolist() == [9.0, 9.0]
    assert frames == [False]
    assert backend.count == 2, "what is before and after it is compiled, and nothing inside"
    with pytest.raises(Exception, match="Lamina compiles its models itself"):
        torch.compile(lambda x: ours(x), fullgraph=True, backend=backend)(torch.ones(2))


def test_the_settings_of_torch_are_those_of_its_source():
    """What a user's variables made of them at import does not count either."""
    from torch._inductor import config

    shipped = torch_section._shipped("torch._inductor.config")
    assert len(shipped) > 300
    assert "cpp.cxx" not in shipped
    assert all(hasattr(config, name) or "." in name for name in shipped)
