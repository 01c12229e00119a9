"""CUDA kernels without warp instructions, compiled as C++ and run thread by thread: the formulas' bits."""

import ctypes
import functools
import importlib
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.custom_ops.registry import select

SOURCES = Path(__file__).resolve().parent / "host_cuda"
COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Callable[..., Any]]:
    """on_host(op) -> the CUDA provider's call, with its kernel run here."""

    @functools.cache
    def load(op: str) -> Callable[..., Any]:
        library = tmp_path_factory.mktemp("host") / f"{op}.so"
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w", f"-I{SOURCES}"]
        flags.append("-fno-gnu-unique")  # each of these libraries has globals of its own
        command = [str(COMPILER), *flags, str(SOURCES / f"{op}.cpp"), "-o", str(library)]
        subprocess.run(command, check=True)
        entry = ctypes.CDLL(str(library)).run

        class Kernel:
            def __init__(self, name: str, layout: str) -> None:
                self._arguments = struct.Struct(f"{layout}q")

            def __call__(self, device: torch.device, *fields: Any) -> None:
                entry(ctypes.c_char_p(self._arguments.pack(*fields, 0)))

        provider = importlib.import_module(f"lamina.custom_ops.{op}._cuda")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(provider, "CudaKernel", Kernel)
            call: Callable[..., Any] = provider.load()
        return call

    return load


def formula(op: str) -> Callable[..., Any]:
    return select(op, device=torch.device("cpu"), dtype=torch.float32, provider="reference").call


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("vocab", [40, 9000])  # one slice, and part of a second
def test_adjusted_logits_have_the_formulas_bits(on_host: Any, vocab: int) -> None:
    kernel, m = on_host("adjust_logits"), 3
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, *shape: int, of: torch.Generator = generator) -> Tensor:
            return torch.randint(low, high, shape, generator=of, dtype=torch.int32)

        history = integers(0, min(vocab, 50), 4, 600)
        lengths, slots = integers(4, 600, m).long(), torch.tensor([1, 3, 0])
        words = torch.full((m, 3, 3), -1, dtype=torch.int32)
        for row, slot, length in zip(words, slots.tolist(), lengths.tolist(), strict=True):
            row[0, :2] = history[slot, length - 2 : length]  # met
            row[1, 1] = history[slot, length - 1] + 1  # not met
            row[:, 2] = torch.randperm(vocab, generator=generator)[:3]
        num_valid_ids, has_all = vocab - seed % 3, seed % 2 == 0
        num_biases, num_words = (4, -(-num_valid_ids // 32)) if has_all else (0, 0)
        given = (
            torch.randn(5, vocab, generator=generator) * 3,
            torch.tensor([4, 0, 2]),
            history,
            slots,
            lengths,
            (lengths * torch.rand(m, generator=generator)).int(),
            torch.tensor([[1.0, 1.7, 0.6], [0.4, 0.0, -1.0], [0.3, -0.7, 0.0]]),
            torch.randperm(vocab, generator=generator)[:num_biases].int().repeat(m, 1),
            torch.randn(m, num_biases, generator=generator),
            integers(-(2**31), 2**31 - 1, m, num_words),
            words if has_all else words[:, :0].contiguous(),
            integers(-1, vocab + 3, m, 2),
            num_valid_ids,
        )
        outs = [torch.full((m, vocab + 8), torch.nan) for _ in range(2)]
        for call, out in zip((kernel, formula("adjust_logits")), outs, strict=True):
            call(*given, out)
        assert same_bits(*outs)


@pytest.mark.parametrize("vocab", [7, 50, 3000])
def test_what_is_typical_is_what_the_formula_keeps(on_host: Any, vocab: int) -> None:
    kernel, generator = on_host("keep_typical"), torch.Generator().manual_seed(vocab)
    temperature = torch.tensor([1.0, 0.5, 1.7, 1.0, 1.0, 1.0, 0.0, 1.0])
    typical_p = torch.tensor([0.1, 0.9, 0.5, 0.99, 0.3, 0.2, 0.5, 1.0])
    for scale in (0.5, 3.0, 8.0):
        logits = torch.randn(8, vocab, generator=generator) * scale
        logits[1, : vocab // 3] = -torch.inf
        logits[2] = logits[2].round()
        logits[3, 2], logits[4, 3] = (torch.nan, torch.inf) if scale == 8.0 else (0.0, 0.0)
        logits[5] = -torch.inf if scale == 8.0 else 0.0
        outs = [logits.clone(), logits.clone()]
        for call, out in zip((kernel, formula("keep_typical")), outs, strict=True):
            call(out, temperature, typical_p)
        assert same_bits(*outs)
        assert not same_bits(outs[0], logits)


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("num_ids", [20, 5000])
def test_the_likeliest_are_those_of_the_formula(on_host: Any, num_ids: int, num_top: int) -> None:
    kernel, generator = on_host("top_logprobs"), torch.Generator().manual_seed(num_ids)
    logits = torch.randn(6, num_ids + 3, generator=generator) * 3
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, ::1024] += 50  # all of one thread's
    logits[4, 7], logits[5] = torch.inf, -torch.inf
    token_ids = torch.tensor([5, 0, num_ids - 1, 3, 7, num_ids + 1], dtype=torch.int32)
    got = kernel(logits, token_ids, num_ids, num_top)
    right = formula("top_logprobs")(logits, token_ids, num_ids, num_top)
    assert torch.equal(got[0], right[0])
    assert torch.equal(got[2], right[2])
    torch.testing.assert_close(got[1], right[1], rtol=1e-5, atol=1e-5)
