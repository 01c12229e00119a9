"""What a streamed token costs the server's process in CPU time: many streams of a model that is made up.

The client runs here, in a process of its own; the cost is that of the thread or process that answers HTTP, by
what the kernel has counted for it, from before the first request until the last has been read. An engine that
runs ahead has its tokens merged, which costs less: --rate holds it to a pace at which each is an event.
--bare: what the same events cost a program that does nothing but write them.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lamina.cli.info import describe_machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "serving_cost.json"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = ["<s>", "</s>", *LETTERS, "\u0120", *(f"\u0120{a}{b}" for a in LETTERS for b in LETTERS)][:512]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def main() -> None:
    """Print microseconds a token for each number of streams, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("streams", nargs="*", type=int, default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--runs", type=int, default=3, help="of each case, all of which are written")
    parser.add_argument("--engine", choices=("process", "thread"), default="process")
    parser.add_argument("--chat", action="store_true", help="chats in place of completions")
    parser.add_argument("--whole", action="store_true", help="answers whole, in place of streams")
    parser.add_argument("--rate", type=float, help="tokens a second that the engine makes at most, in all")
    parser.add_argument("--bare", action="store_true", help="sockets alone, with --rate: bare_writer.py")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = {name: describe_machine()[name] for name in ("cpu", "cores", "python", "versions")}
    document: dict[str, Any] = {"machine": machine, "cases": []}
    document |= {"engine": options.engine, "chat": options.chat, "whole": options.whole, "rate": options.rate}
    document["bare"] = options.bare
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for streams in options.streams:
            with served(Path(folder), options, streams) as server:
                asyncio.run(load(server.url, streams, 8, options))  # what is made at first use is made
                for _ in range(options.runs):
                    case = measure(server, streams, options.tokens, options)
                    document["cases"].append(case)
                    print(line(case), flush=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def line(case: dict[str, Any]) -> str:
    """One case in words."""
    rate, cost = case["tokens"] / case["seconds"], case["microseconds_a_token"]
    return f"{case['streams']} streams, {rate:,.0f} tokens/s: {cost:.1f} us of CPU a token"


def write_model(folder: Path) -> None:
    """Write a config, and a tokenizer each token of which is text of its own."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(VOCAB)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(VOCAB[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    roles = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles})
    )


class Served:
    """A server in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, engine: str) -> None:
        self.process, self.url, self.engine = process, url, engine

    def cpu_seconds(self) -> float:
        """What the kernel has counted for those that answer HTTP: without the engine, wherever it runs."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        names = os.listdir(tasks) if self.engine == "process" else [str(self.process.pid)]
        return sum(int((tasks / name / "schedstat").read_text().split()[0]) for name in names) / 1e9


@contextmanager
def served(folder: Path, options: argparse.Namespace, streams: int) -> Iterator[Served]:
    """Yields a server that is ready for so many streams."""
    program = ["-m", "lamina"] if options.rate is None else [str(HERE / "paced_engine.py"), str(options.rate)]
    command = [sys.executable, *program, "serve", str(folder), "--engine", options.engine, "--port", "0"]
    command += ["--load-format", "dummy", "--max-num-seqs", str(streams), "--max-sequences", "4096"]
    command += ["--num-kv-blocks", str(streams * 64 + 1), "--max-num-batched-tokens", "4096"]
    if options.bare:
        command = [sys.executable, str(HERE / "bare_writer.py"), str(options.rate), str(streams)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # so small a model gains nothing from more
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        said = next(line for line in process.stdout if "serving" in line)
        yield Served(process, said.split()[-1], options.engine)
    finally:
        process.terminate()
        process.wait(60)


def measure(server: Served, streams: int, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what so many streams of so many tokens take."""
    cpu, start = server.cpu_seconds(), time.perf_counter()
    counted, events = asyncio.run(load(server.url, streams, tokens, options))
    seconds, cpu = time.perf_counter() - start, server.cpu_seconds() - cpu
    assert counted == streams * tokens, f"{counted} tokens came of {streams * tokens}"
    return {
        "streams": streams,
        "tokens": counted,
        "events": events,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu, 4),
        "microseconds_a_token": round(cpu / counted * 1e6, 2),
    }


async def load(url: str, streams: int, tokens: int, options: argparse.Namespace) -> tuple[int, int]:
    """Returns how many tokens and events come of so many streams at once."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    results = await asyncio.gather(
        *(one_stream(host, int(port), number, tokens, options) for number in range(streams))
    )
    return sum(tokens for tokens, _ in results), sum(events for _, events in results)


async def one_stream(
    host: str, port: int, number: int, tokens: int, options: argparse.Namespace
) -> tuple[int, int]:
    """Returns the tokens and events of one answer, which is read as fast as it comes."""
    asked: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "seed": number}
    if not options.whole:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/chat/completions" if options.chat else "/v1/completions"
    text = f" {LETTERS[number % 26]}{LETTERS[number // 26 % 26]}"
    asked |= {"messages": [{"role": "user", "content": text}]} if options.chat else {"prompt": text}
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    events, last = 0, b""
    while data := await reader.read(1 << 16):
        events += data.count(b"data: ")
        last = (last + data)[-1024:]
    writer.close()
    usage = json.loads(last.rpartition(b'"usage":')[2].partition(b"}}")[0] + b"}}")
    return int(usage["completion_tokens"]), events


if __name__ == "__main__":
    main()
