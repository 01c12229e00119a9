"""`lamina serve` as a process of its own, with clients of it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
SMALL = ("--no-compile", "--device", "cpu", "--num-kv-blocks", "2048", "--max-num-seqs", "32")
LONG = ("--max-model-len", "30000", "--allow-long-context")


@dataclass(kw_only=True, slots=True)
class Streamed:
    """A stream as its client got it; error: what httpx raised, where it was cut off."""

    status: int
    body: str = ""
    error: str | None = None

    @property
    def events(self) -> list[Any]:
        """What the events hold, without the mark of the end."""
        held = [line.removeprefix("data: ") for line in self.body.splitlines() if line.startswith("data: ")]
        return [json.loads(each) for each in held if each != "[DONE]"]

    @property
    def is_whole(self) -> bool:
        """Whether it ended as every stream does."""
        return self.status == 200 and self.body.endswith("data: [DONE]\n\n") and self.error is None

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of its last choice."""
        return next(
            (e["choices"][0]["finish_reason"] for e in reversed(self.events) if e.get("choices")), None
        )


class ServerProcess:
    """A server that has begun; what it says is kept, and it is ended with the block."""

    def __init__(self, folder: Path | str, *options: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "lamina", "serve", str(folder), "--port", "0", *options]
        self.process = subprocess.Popen(
            command,
            env=ENVIRONMENT | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            text=True,
        )
        self.out: list[str] = []
        self.errors: list[str] = []
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._keep, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()
        self._pool = ThreadPoolExecutor(64)
        self._client: httpx.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._pool.shutdown()
        if self._client is not None:
            self._client.close()
        for reader in self._readers:
            reader.join(60)

    @property
    def client(self) -> httpx.Client:
        """A client of the server, once it listens."""
        if self._client is None:
            found = self.wait_for(self.errors, r"listening at (\S+);")
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._client = httpx.Client(base_url=found[1], timeout=120, limits=limits)
        return self._client

    def wait_ready(self) -> httpx.Client:
        """The same once it is ready, which it says in one line."""
        self.wait_for(self.out, r"lamina: serving (.+) at (\S+)")
        return self.client

    def wait_for(self, lines: list[str], pattern: str, seconds: float = 120) -> re.Match[str]:
        """The first line that holds this; fails if the process ends before, or after so many seconds."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                found = next((m for line in lines if (m := re.search(pattern, line))), None)
                if found is not None:
                    return found
                is_over = self.process.poll() is not None and not any(r.is_alive() for r in self._readers)
                assert not is_over, f"ended with {self.process.returncode}: {self.errors}"
                assert time.monotonic() < deadline, f"no {pattern!r} in {lines}"
                self._changed.wait(0.5)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def code(self, timeout: float = 60) -> int:
        """Its exit code, once it has ended by itself."""
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(60)
        assert not any("Traceback" in line for line in self.errors), "".join(self.errors)
        return code

    def stream(self, max_tokens: int, **fields: Any) -> Future[Streamed]:
        """Ask for a stream of so many tokens, in a thread; done once it has ended, however."""
        body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **fields}
        return self._pool.submit(_streamed, self.client, body)

    def wait_streaming(self, count: int) -> None:
        """Wait until so many requests are being computed, and so many tokens each were on average."""
        for _ in _patience():
            text = self.client.get("/metrics").text
            running, tokens = (
                float(found[1])
                if (found := re.search(rf"^lamina:{name}\S* (\S+)", text, re.MULTILINE))
                else 0
                for name in ("num_requests_running", "generation_tokens_total")
            )
            if running >= count and tokens >= count * 10:
                return

    def _keep(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line)
                self._changed.notify_all()
        stream.close()


def _streamed(client: httpx.Client, body: dict[str, Any]) -> Streamed:
    answer = Streamed(status=0)
    try:
        with client.stream("POST", "/v1/completions", json=body) as response:
            answer.status = response.status_code
            for text in response.iter_text():
                answer.body += text
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


def _patience() -> Iterator[None]:
    for _ in range(1200):
        yield
        time.sleep(0.05)
    raise AssertionError("it does not come to it in a minute")


def assert_serves_again(server: ServerProcess) -> None:
    """A server whose engine was lost says that it loads it again, and then answers where it did before."""
    server.wait_for(server.errors, r"the model is loaded again, and \d+ times more at most", 600)
    deadline = time.monotonic() + 600
    while server.client.get("/health/ready").status_code != 200:
        assert server.process.poll() is None
        assert time.monotonic() < deadline, "it is not ready again"
        time.sleep(0.05)
    answer = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
