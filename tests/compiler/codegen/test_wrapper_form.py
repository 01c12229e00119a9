"""Which generated sources are run by their own few names, and that all others are run whole."""

import ast
import sys

import pytest
import torch

from lamina import Runtime, SamplingParams
from lamina.compiler.codegen import torch_wrapper, wrapper, wrapper_form
from lamina.compiler.torch_internals import torch_compat

HEADER = """
import torch
from math import inf, nan
from torch import device, empty_strided
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.runtime.runtime_utils import assert_tensor_metadata
aten = torch.ops.aten
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()
cpp_fused_0 = async_compile.cpp_pybinding(["float*"], "...")
async_compile.wait(globals())
del async_compile
"""
RUNNER = """
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions
    def call(self, args):
        x, = args
        args.clear()
        assert_size_stride(x, (3, ), (1, ), 'input')
        y = empty_strided_cpu((3, ), (1, ), torch.float32)
        torch.ops.aten.add.out(x, 1.0, out=y)
        z = aten.mul.Tensor(y, 2.0)
        assert_tensor_metadata(z, (3, ), (1, ), torch.float32, 'aten.mul')
        return (z, )
runner = Runner(partitions=[])
call = runner.call
"""
SOURCE = HEADER + RUNNER
FUNCTION = HEADER + "def call(args):\n    x, = args\n    args.clear()\n    return (x + 1, )\n"


def obstacle(source):
    return wrapper_form.obstacle(ast.parse(source), {"cpp_fused_0"}, vars(wrapper.ExternKernels))


@pytest.mark.parametrize("source", [SOURCE, FUNCTION, SOURCE + "if __name__ == '__main__':\n    print(1)\n"])
def test_what_torch_writes_is_known(source):
    assert obstacle(source) is None


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("class Runner", "class Walker", "it has no function that calls its kernels"),
        ("class Runner:", "class Runner(Base):", "its Runner has another form"),
        ("    def call(self, args)", "    @staticmethod\n    def call(args)", "its Runner has another form"),
        ("def call(self, args)", "def call(self, args, stream)", "its Runner has another form"),
        ("(self, partitions):", "(self, partitions, pool):", "its Runner has another form"),
        ("x, = args", "x, = args\n        x = self.partitions[0](x)", "its Runner has another form"),
        ("runner = Runner(partitions=[])", "runner = Runner(partitions=[f])", "its Runner has another form"),
        ("call = runner.call", "call = traced(runner.call)", "its Runner has another form"),
        ("\nrunner =", "\nset_allocator(own)\nrunner =", "it does 'set_allocator(own)'"),
        ("\nrunner =", "\nwith pool():\n    pass\nrunner =", "it does 'with pool():'"),
        ("y = empty_strided_cpu(", "y = empty_strided_gpu(", "it uses empty_strided_gpu"),
        ("torch.ops.aten.add.out(", "torch.accelerator.add(", "it uses torch.accelerator.add"),
        ("torch.ops.aten.add.out(", "extern_kernels.mega_mm(", "it uses extern_kernels.mega_mm"),
        ("y = empty", "y = getattr(torch, 'empty')()\n        y = empty", "it uses getattr"),
        ("guards._empty_strided_cpu", "guards._empty_strided_cpu_v2", "it uses empty_strided_cpu"),
        ("from math import inf, nan", "from math import inf\ncpp_fused_1 = 3", None),
        ("runtime_utils import", "runtime_checks import", "it uses assert_tensor_metadata"),
    ],
)
def test_a_source_of_another_form_is_said_to_need_inductor(old, new, why):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert obstacle(changed) == why


def test_a_known_source_is_run_by_its_names_and_an_unknown_one_whole(store, caplog, monkeypatch):
    """The unknown one is said once, however many pieces there are of it."""
    known = store.put(SOURCE.replace("cpp_fused_0 = ", "other = ").encode())
    strange = store.put((SOURCE.replace("cpp_fused_0 = ", "other = ") + "\nprint()\n").encode())
    namespace = {"call": lambda arguments: ("whole",)}
    monkeypatch.setattr(torch_compat, "run_source", lambda *arguments: namespace)
    with caplog.at_level("WARNING", logger="lamina.compiler"):
        calls = [
            wrapper.load_source(digest, {}, {}, store, torch.device("cpu")) for digest in (known, strange)
        ]
        wrapper.load_source(strange, {}, {}, store, torch.device("cpu"))
    x = torch.arange(3.0)
    assert torch.equal(calls[0]([x])[0], (x + 1) * 2)
    assert calls[1]([x]) == ("whole",)
    assert caplog.text.count("Inductor's own wrapper, whose import takes seconds at each start: it does") == 1


def test_what_an_op_returned_is_checked_as_torch_checks_it():
    check = torch_wrapper.wrapper_values()["torch._inductor.runtime.runtime_utils.assert_tensor_metadata"]
    x = torch.zeros(2, 3)
    check(x, (2, 3), (3, 1), torch.float32, "op")
    check(None, (), (), torch.float32)
    with pytest.raises(RuntimeError, match=r"returned torch\.float32; its fake promised"):
        check(x, (2, 3), (3, 1), torch.float16, "op")
    with pytest.raises(AssertionError, match="expected size"):
        check(x, (3, 2), (3, 1), torch.float32, "op")


def test_an_unknown_wrapper_serves_the_same_tokens_uncaptured(tiny_folder, tmp_path, monkeypatch):
    """Whatever a torch version writes otherwise: as slow as it may be, and right, at every start."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [[1, 5, 9], [7, 8]]

    def answers(**settings):
        settings |= {"dtype": "float32", "cache_dir": tmp_path}
        with Runtime.from_pretrained(tiny_folder, **settings) as runtime:
            written = [list(answer.outputs[0].token_ids) for answer in runtime.generate(prompts, params)]
            return written, runtime.stats()["compile"]["compiled"]

    wanted, _ = answers(compile=False)
    monkeypatch.setattr(wrapper_form, "obstacle", lambda *arguments: "it has a form of the future")
    assert answers() == (wanted, 3)
    assert answers() == (wanted, 0)
    assert "torch._inductor" in sys.modules
