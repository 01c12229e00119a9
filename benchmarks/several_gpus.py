"""What two GPUs have to show, part by part within a few minutes: tests, sums, and whole models over both.

Each part is a process with a limit of its own. Its result is printed as it is known, and the end of its log
where
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests" / "gpu"
PYTEST = ("-m", "pytest", "-n0", "-p", "no:cacheprovider", "-q", "--tb=short")
OF_RANKS = "(two_gpus and llama) or bfloat16 or killed or every_way or greedy"  # a family is enough
OF_STAGES = "(two_stages and llama) or bfloat16 or drafts or killed"
SHAPE = ("--repeats", "3", "--batches", "1", "32", "256", "--prefills", "2048")
LINES_OF_FAILURE = 30
LINES_OF_RESULT = 14
CLOSING_SECONDS = 8.0  # for a part that is late to end by itself


@dataclass(frozen=True, slots=True)
class Part:
    """A command of this interpreter, and the seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    limit: int


def parts_of(output: Path, shape: str) -> tuple[Part, ...]:
    """All parts, those first of which most is not known yet."""

    def whole(name: str, limit: int, *options: str) -> Part:
        document = ("--output", str(output / f"{name.replace(' ', '_')}.json"))
        return Part(name, (str(HERE / "gpu.py"), shape, *SHAPE, *document, *options), limit)

    tensor, pipeline = ("--tensor-parallel", "2"), ("--pipeline-parallel", "2")
    fp8 = ("--quantization", "fp8", "--no-mixed")
    sums = (str(HERE / "all_reduce.py"), "--ranks", "2", "--rounds", "10")
    return (
        Part("tests of ranks", (*PYTEST, str(TESTS / "test_tensor_parallel.py"), "-k", OF_RANKS), 170),
        whole("ranks bfloat16", 100, *tensor),
        Part("tests of stages", (*PYTEST, str(TESTS / "test_pipeline_parallel.py"), "-k", OF_STAGES), 190),
        whole("stages bfloat16", 75, *pipeline),
        Part("sums", (*sums, "--output", str(output / "sums.json")), 30),
        whole("ranks fp8", 80, *tensor, *fp8),
        whole("stages fp8", 60, *pipeline, *fp8),
    )


def main() -> None:
    """Run the parts in order until all are over or the time is, print what each came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="beginnings of names, in place of all parts")
    parser.add_argument("--seconds", type=int, default=540, help="for all parts together")
    parser.add_argument("--shape", default="8b", help="of the models, as of benchmarks/gpu.py")
    parser.add_argument("--output", type=Path, default=Path("/tmp/lamina-several-gpus"), help="a folder")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    for part in parts_of(options.output, options.shape):
        if options.parts and not part.name.startswith(tuple(options.parts)):
            continue
        left = deadline - time.monotonic()
        print(
            run(part, options.output, min(part.limit, left)) if left > 0 else f"{part.name}: no time",
            flush=True,
        )


def run(part: Part, output: Path, limit: float) -> str:
    """What a part came to, in a few lines; its whole log lies in the output folder."""
    log = output / f"{part.name.replace(' ', '_')}.log"
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LAMINA_LOG_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"},
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            _end(process)
    seconds = time.monotonic() - started
    lines = log.read_text(errors="replace").splitlines()
    if status == 0:
        return "\n".join([f"{part.name}: passed in {seconds:.0f} s", *_results(lines)])
    what = f"late after {seconds:.0f} s" if status is None else f"failed ({status}) after {seconds:.0f} s"
    return "\n".join([f"{part.name}: {what}", *_results(lines), "  …", *_shown(lines[-LINES_OF_FAILURE:])])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a part, which may say first what it has found; its workers end with it."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(CLOSING_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _results(lines: Sequence[str]) -> list[str]:
    """Lines that say what was measured, which tests failed, and how GPUs reach each other."""
    words = (
        "decode batch",
        "first token",
        "mixed",
        "start {",
        "KiB",
        "FAILED",
        " passed",
        " failed",
        " skipped",
        "all_reduce on",
    )
    return _shown([line for line in lines if any(word in line for word in words)][-LINES_OF_RESULT:])


def _shown(lines: Sequence[str]) -> list[str]:
    return [f"  {line[:200]}" for line in lines]


if __name__ == "__main__":
    main()
