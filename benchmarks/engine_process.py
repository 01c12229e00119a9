"""What it costs to have the engine in a process of its own: CPU per token on either side, and the rate kept.

Streams of a TINY model with random weights are read by a task each. Times are CPU times of threads and
processes, as the machine may be shared; the rate is in wall time, so compare it within a run alone.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lamina import AsyncRuntime, SamplingParams
from lamina.runtime.protocol import wire
from lamina.runtime.protocol.core_messages import AddRequests, StepOutputs
from lamina.runtime.protocol.engine_output import EngineOutput
from lamina.runtime.protocol.engine_request import EngineRequest

RESULTS = Path(__file__).resolve().parent / "results" / "engine_process.json"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
}
SETTINGS: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "compile": False, "num_kv_blocks": 6000}


def main() -> None:
    """Print a line a measurement, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    document: dict[str, Any] = {"python": sys.version.split()[0], "cores": len(os.sched_getaffinity(0))}
    document["wire"] = measure_wire()
    print("wire", document["wire"], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        document["start"] = {
            engine: asyncio.run(measure_start(Path(folder), engine)) for engine in ("process", "thread")
        }
        print("start", document["start"], flush=True)
        for num_streams in options.streams:
            found = asyncio.run(measure(Path(folder), num_streams, options.tokens, options.rounds))
            document[f"{num_streams}_streams"] = found
            print(num_streams, "streams", json.dumps(found), flush=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def write_model(folder: Path) -> None:
    """A folder with a config and a tokenizer of bytes, which is enough for random weights."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def measure_wire() -> dict[str, float]:
    """Microseconds of CPU a token of a step of 256, and a request, to write and to read."""
    outputs = (EngineOutput(request_id=str(i), num_before=i, new_token_ids=(i,)) for i in range(256))
    step = StepOutputs(outputs=tuple(outputs))
    params = SamplingParams(stop=["\n"], max_tokens=128).resolve(None, seed=1)
    request = EngineRequest(
        request_id="1", prompt_token_ids=tuple(range(512)), params=params, max_total_tokens=640
    )
    asked = AddRequests(requests=(request,))
    step_frame, asked_frame = wire.encode(step), wire.encode(asked)
    return {
        "encode_us_per_token": round(cpu_us(lambda: wire.encode(step)) / 256, 3),
        "decode_us_per_token": round(cpu_us(lambda: wire.decode(step_frame)) / 256, 3),
        "bytes_per_token": round(len(step_frame) / 256, 1),
        "encode_us_per_request": round(cpu_us(lambda: wire.encode(asked)), 1),
        "decode_us_per_request": round(cpu_us(lambda: wire.decode(asked_frame)), 1),
    }


def cpu_us(action: Callable[[], object], repeats: int = 500) -> float:
    """The best of five: CPU microseconds of one call."""
    times = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(repeats):
            action()
        times.append(time.process_time() - began)
    return min(times) / repeats * 1e6


async def measure_start(folder: Path, engine: Any) -> dict[str, float]:
    """Seconds until it is ready, and megabytes that this process has then; the process first."""
    began = time.perf_counter()
    async with await AsyncRuntime.from_pretrained(folder, engine=engine, **SETTINGS):
        seconds = time.perf_counter() - began
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"seconds": round(seconds, 2), "rss_mb": round(pages * os.sysconf("SC_PAGESIZE") / 1e6)}


async def measure(folder: Path, num_streams: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Medians of a few rounds, an engine in a process and one in a thread by turns."""
    found: dict[str, list[dict[str, float]]] = {"process": [], "thread": []}
    for _ in range(rounds):
        for engine, figures in found.items():
            figures.append(await serve(folder, engine, num_streams, num_tokens))
    medians = {engine: median_of(figures) for engine, figures in found.items()}
    rates = [medians[engine]["tokens_per_second"] for engine in ("process", "thread")]
    return medians | {"process_to_thread": round(rates[0] / rates[1], 3)}


def median_of(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in figures) for name in figures[0]}


async def serve(folder: Path, engine: Any, num_streams: int, num_tokens: int) -> dict[str, float]:
    """What one load costs, in microseconds of CPU a token, and its rate."""
    settings = SETTINGS | {"max_num_seqs": max(num_streams, 8)}
    async with await AsyncRuntime.from_pretrained(folder, engine=engine, **settings) as runtime:
        await read(runtime, 16)
        before, began = spent(), time.perf_counter()
        total = sum(await asyncio.gather(*(read(runtime, num_tokens) for _ in range(num_streams))))
        seconds, after = time.perf_counter() - began, spent()
    cpu = {name: (after[name] - before[name]) / total * 1e6 for name in after}
    return {name: round(value, 2) for name, value in cpu.items()} | {
        "tokens_per_second": round(total / seconds)
    }


async def read(runtime: AsyncRuntime, num_tokens: int) -> int:
    """Reads a stream as a server does, and returns its tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    generation, num_read = runtime.generate([1, 2, 3, 4], params), 0
    while deltas := await generation.read():
        num_read += sum(len(delta.token_ids) for delta in deltas)
    return num_read


def spent() -> dict[str, float]:
    """Seconds of CPU so far: of this process, of its event loop, and of what reads from the engine."""
    readers = [each.native_id for each in threading.enumerate() if each.name == "lamina-core-reader"]
    ran = [Path(f"/proc/self/task/{reader}/schedstat").read_text().split()[0] for reader in readers]
    return {
        "this_process_us": time.process_time(),
        "event_loop_us": time.thread_time(),
        "reader_us": sum(map(int, ran)) / 1e9,
    }


if __name__ == "__main__":
    main()
