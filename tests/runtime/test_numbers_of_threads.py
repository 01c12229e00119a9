"""Another number of threads: the same tokens, and nothing compiled, traced or measured anew."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lamina import Runtime, SamplingParams
from lamina.common.store import Store

PROMPTS = [[(7 * place + 31 * number) % 317 + 3 for place in range(1 + 5 * number)] for number in range(20)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
NUMBERS = (1, 2, 3, 16)
KINDS = "plans", "pieces", "kernels", "measurements"


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_and_cache_entries_are_those_of_one_thread(
    tiny_folder: Path, compile_cache: Path, dtype: str
) -> None:
    found, kept = [], []
    for number in NUMBERS:
        torch.set_num_threads(number)
        with Runtime.from_pretrained(
            tiny_folder, dtype=dtype, cache_dir=compile_cache, require_warm=number > 1
        ) as runtime:
            found.append([output.outputs[0].token_ids for output in runtime.generate(PROMPTS, GREEDY)])
        store = Store(compile_cache)
        kept.append({kind: sorted(store.refs(kind)) for kind in KINDS})
    assert found == [found[0]] * len(NUMBERS)
    assert kept == [kept[0]] * len(NUMBERS)
