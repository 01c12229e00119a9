"""From start to close: what a runtime leaves behind (nothing), and what it survives."""

import gc
import json
import logging
import os
import random
import signal
import threading
import warnings
import weakref
from pathlib import Path

import numpy
import pytest
import torch

from lamina import ClosedError, Runtime, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8]]


def tokens_of(runtime, prompts=PROMPTS):
    return [output.outputs[0].token_ids for output in runtime.generate(prompts, GREEDY)]


def test_closing_twice_is_harmless_and_use_after_it_says_so(tiny_folder):
    runtime = Runtime.from_pretrained(tiny_folder, compile=False)
    runtime.close()
    runtime.close()
    for use in (runtime.stats, runtime.explain, lambda: runtime.generate([1]), lambda: runtime.stream([1])):
        with pytest.raises(ClosedError, match="closed"):
            use()


@pytest.mark.parametrize("how", ["close", "del", "with"])
def test_weights_and_cache_are_gone_when_the_runtime_is(tiny_folder, how):
    runtime = Runtime.from_pretrained(tiny_folder, compile=False)
    tokens_of(runtime)
    loaded = runtime._loaded  # the only way to what must die
    watched = [weakref.ref(tensor) for tensor in loaded.weights.by_name.values()]
    watched += [weakref.ref(keys) for keys, _ in loaded.core._executor.model_runner._attention._caches]
    del loaded
    if how == "with":
        with runtime:
            pass
    elif how == "close":
        runtime.close()
    else:
        del runtime
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)


def test_five_models_in_one_process_take_the_memory_of_one(tiny_folder, tmp_path):
    config = json.loads((tiny_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 65536, "hidden_size": 256}))
    sizes = []
    for _ in range(5):
        with Runtime.from_pretrained(tmp_path, load_format="dummy", compile=False) as runtime:
            tokens_of(runtime)
            weights = sum(weight.nbytes for weight in runtime._loaded.weights.by_name.values())
        sizes.append(resident_bytes())
    assert weights > 128 << 20
    assert sizes[-1] - sizes[0] < weights / 4


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def process_state():
    """Everything of this process that a library has no business to change."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    modes = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    drawn = random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()
    children = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "handlers": handlers,
        "warnings": list(warnings.filters),
        "torch": (torch.get_default_dtype(), torch.get_default_device(), *modes),
        "random numbers": drawn,
        "threads": {thread.name for thread in threading.enumerate()},
        "children": "".join(children),
        "logging": list(logging.getLogger().handlers),
    }


@pytest.mark.parametrize("compile", [False, True])
def test_the_process_is_left_as_it_was(tiny_folder, compile_cache, compile):
    Runtime.from_pretrained(tiny_folder, compile=False).close()  # imports what there is to import
    before = process_state()
    with Runtime.from_pretrained(tiny_folder, compile=compile, cache_dir=compile_cache) as runtime:
        tokens_of(runtime)
        stream = runtime.stream([1], GREEDY)
        next(stream)
    assert next(stream).finish_reason == "abort"
    after = process_state()
    assert {name for name, value in before.items() if after[name] != value} == set()
    assert not list(compile_cache.glob("temporary/*"))


def test_a_tokenizer_that_was_given_is_left_as_it_was(open_runtime, bbpe_tokenizer):
    def state(tokenizer):
        names = ("padding_side", "truncation_side", "chat_template", "model_max_length", "special_tokens_map")
        return tokenizer.backend_tokenizer.to_str(), [getattr(tokenizer, name) for name in names]

    tokenizer = bbpe_tokenizer()
    tokenizer.padding_side = "left"
    before = state(tokenizer)
    runtime = open_runtime(tokenizer=tokenizer)
    runtime.generate("hello", SamplingParams(max_tokens=4, stop="x"))
    runtime.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=4))
    runtime.close()
    assert state(tokenizer) == before
