"""llama.cpp as a contender, through llama-cpp-python's low-level interface; docs/cpu.md says how to build it.

It runs in a process of its own: its AMX kernels set up the tiles of a thread once, and die of an illegal
instruction where another library, as torch's does, sets them up otherwise on the same thread.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from clock import Clock, Spent
from numpy.typing import NDArray

MARGIN = 8  # tokens of context beyond what is asked for

Prompts = list[list[int]]


class LlamaCpp:
    """The contender: hands each task to its process, which measures it."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self.name = f"llama.cpp {path.stem.rpartition('.')[2]}"
        command = [sys.executable, __file__, str(path), str(num_threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.build: str = self._receive()["build"]

    def prefill(self, prompts: Prompts) -> Spent:
        return Spent(**self._ask("prefill", prompts))

    def decode(self, prompts: Prompts, num_tokens: int) -> Spent:
        return Spent(**self._ask("decode", prompts, num_tokens))

    def continue_greedily(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The answer to one prompt, to see that this is the model it is meant to be."""
        token_ids: list[int] = self._ask("continue_greedily", prompt, num_tokens)["token_ids"]
        return token_ids

    def _ask(self, task: str, *arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([task, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self.name} ended with status {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


class Worker:
    """A bare greedy loop: all sequences in one batch, the logits of each read by the host."""

    def __init__(self, path: str, num_threads: int) -> None:
        import llama_cpp

        self.library: Any = llama_cpp
        self.num_threads = num_threads
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: C calls it
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            os.fsencode(path), llama_cpp.llama_model_default_params()
        )
        assert self.model, f"llama.cpp cannot load {path}"
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def build(self) -> dict[str, str]:
        """What the library was built with, in its own words."""
        return {"build": self.library.llama_print_system_info().decode()}

    def prefill(self, prompts: Prompts) -> dict[str, float]:
        """Until the first token of every prompt."""
        with self._context(len(prompts), len(prompts[0])) as context:
            clock = Clock()
            self._first_tokens(context, prompts)
            return clock.spent()._asdict()

    def decode(self, prompts: Prompts, num_tokens: int) -> dict[str, float]:
        """For num_tokens tokens a prompt after the first."""
        with self._context(len(prompts), len(prompts[0]) + num_tokens) as context:
            tokens = self._first_tokens(context, prompts)
            clock = Clock()
            marks = [clock.spent()]
            for position in range(len(prompts[0]), len(prompts[0]) + num_tokens):
                tokens = self._step(context, [[token] for token in tokens], position)
                marks.append(clock.spent())
            return clock.between(marks)._asdict()

    def continue_greedily(self, prompt: list[int], num_tokens: int) -> dict[str, list[int]]:
        """The answer to one prompt."""
        with self._context(1, len(prompt) + num_tokens) as context:
            tokens = self._first_tokens(context, [prompt])
            while len(tokens) < num_tokens:
                tokens += self._step(context, [tokens[-1:]], len(prompt) + len(tokens) - 1)
            return {"token_ids": tokens}

    @contextlib.contextmanager
    def _context(self, num_seqs: int, length: int) -> Iterator[Any]:
        """A cache of what is needed, a stream a sequence: attention then reads no other sequence's cells."""
        params = self.library.llama_context_default_params()
        params.n_seq_max = num_seqs
        params.n_ctx = num_seqs * (length + MARGIN)
        params.n_batch = params.n_ctx
        params.n_threads = params.n_threads_batch = self.num_threads
        params.kv_unified = False
        params.no_perf = True
        context = self.library.llama_init_from_model(self.model, params)
        assert context, "llama.cpp cannot make a context"
        try:
            yield context
        finally:
            self.library.llama_free(context)

    def _first_tokens(self, context: Any, prompts: Prompts) -> list[int]:
        return self._step(context, prompts, 0)

    def _step(self, context: Any, tokens: Prompts, position: int) -> list[int]:
        """Compute equally many tokens of each sequence from a position on; the likeliest token after each."""
        count, length = len(tokens), len(tokens[0])
        batch = self.library.llama_batch_init(count * length, 0, 1)
        try:
            batch.n_tokens = count * length
            _fill(batch.token, np.array(tokens, np.int32).reshape(-1))
            _fill(batch.pos, np.tile(np.arange(position, position + length, dtype=np.int32), count))
            _fill(batch.n_seq_id, np.ones(count * length, np.int32))
            _fill(batch.logits, np.tile(np.arange(1, length + 1) == length, count).astype(np.int8))
            for row in range(count * length):
                batch.seq_id[row][0] = row // length
            status = self.library.llama_decode(context, batch)
            assert status == 0, f"llama_decode returned {status}"
        finally:
            self.library.llama_batch_free(batch)
        logits = np.ctypeslib.as_array(self.library.llama_get_logits(context), (count, self.vocab_size))
        return [int(token) for token in logits.argmax(-1)]


def _fill(field: Any, values: NDArray[Any]) -> None:
    np.ctypeslib.as_array(field, values.shape)[:] = values


def main() -> None:
    """Answer each line of standard input by one on standard output, both JSON."""
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    print(json.dumps(worker.build()), flush=True)
    for line in sys.stdin:
        task, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, task)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
