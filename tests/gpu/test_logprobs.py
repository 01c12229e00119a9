"""Log-probabilities on a GPU: the formula's and transformers', from CUDA graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import BeamSearchParams, CompileConfig, Runtime, SamplingParams
from lamina.custom_ops import top_logprobs
from lamina.custom_ops.top_logprobs.reference import IMPOSSIBLE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = [[3 + (7 * row + 3 * column) % 300 for column in range(4 + 9 * row)] for row in range(8)]
WANTED = SamplingParams(
    temperature=0.9, top_k=50, seed=3, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("num_top", [0, 1, 6, 20, 100])  # the last is more than the kernel has room for
@pytest.mark.parametrize("num_rows, vocab", [(1, 320), (70, 32000), (5, 128256), (3, 256000)])
@pytest.mark.parametrize("kind", ["any", "many equals", "likeliest side by side", "broken"])
def test_the_op_gives_on_a_gpu_what_it_gives_on_the_cpu(
    num_rows: int, vocab: int, num_top: int, dtype: torch.dtype, kind: str
) -> None:
    logits = (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    if kind == "many equals":
        logits = logits.round()
    elif kind == "likeliest side by side":  # for the kernel's threads: all in the first few
        logits[:, ::1024] += 50
        logits[:, 1::1024] += 40
    elif kind == "broken":
        logits[0, 5], logits[-1] = torch.inf, -torch.inf
        assert 0 in top_logprobs(logits, torch.zeros(num_rows, dtype=torch.int32), vocab - 7, 0)[2].tolist()
    token_ids = torch.arange(num_rows, dtype=torch.int32) * 4
    token_ids[0] = vocab - 1  # of the padding
    right = top_logprobs(logits, token_ids, vocab - 7, num_top)
    ids, logprobs, ranks = top_logprobs(logits.cuda(), token_ids.cuda(), vocab - 7, num_top)
    assert torch.equal(ids.cpu(), right[0])
    assert torch.equal(ranks.cpu(), right[2])
    # In float32 a sum of very many equal terms loses digits.
    exact = logits[:, : vocab - 7].float().double().log_softmax(-1)
    exact = exact.gather(1, right[0].long().clamp(max=vocab - 8)).float()
    exact = torch.where(right[1] == IMPOSSIBLE, IMPOSSIBLE, exact)
    torch.testing.assert_close(logprobs.cpu(), exact, rtol=1e-5, atol=1e-5)


def test_the_op_can_be_captured() -> None:
    logits, token_ids = torch.randn(9, 1000, device="cuda"), torch.arange(9, dtype=torch.int32, device="cuda")
    top_logprobs(logits, token_ids, 1000, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = top_logprobs(logits, token_ids, 1000, 4)
    logits.normal_()
    graph.replay()
    for got, right in zip(captured, top_logprobs(logits, token_ids, 1000, 4), strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("cuda_graphs", ["auto", "off"])
def test_reports_are_those_of_transformers_and_cost_no_capture(
    tiny_folder: Path, tiny_reference: Callable[[Path], Any], compile_cache: Path, cuda_graphs: Any
) -> None:
    settings = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 64, "prefill_chunk": 17}
    config = CompileConfig(cuda_graphs=cuda_graphs)
    with Runtime.from_pretrained(
        tiny_folder, device="cuda", cache_dir=compile_cache, compile=config, **settings
    ) as runtime:
        outputs = runtime.generate(PROMPTS, WANTED)
        assert (runtime.stats()["cuda_graphs"]["eager_steps"] == 0) == (cuda_graphs == "auto")
        searched = runtime.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    model = tiny_reference(tiny_folder)
    for output in outputs:
        answer, prompt = output.outputs[0], list(output.prompt_token_ids)
        with torch.inference_mode():
            rows = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert answer.logprobs is not None
        entries = [*output.prompt_logprobs[1:], *answer.logprobs]
        assert len(entries) == len(prompt) + 20 - 1
        for entry, row in zip(entries, rows, strict=False):
            assert entry is not None
            for token_id, report in entry.items():
                assert report.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
    with Runtime.from_pretrained(tiny_folder, device="cpu", compile=False, dtype="float32") as runtime:
        right = runtime.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    for output, same in zip(searched, right, strict=True):
        sums = [answer.cumulative_logprob for answer in output.outputs]
        assert sums == pytest.approx([answer.cumulative_logprob for answer in same.outputs], abs=1e-3)
