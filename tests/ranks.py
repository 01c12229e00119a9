"""Ranks of a model, as threads of this process or as processes that talk over gloo."""

import multiprocessing
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lamina.custom_ops.all_reduce.gloo_group import GlooGroup
from lamina.custom_ops.all_reduce.group import Group, group_of_thread, set_group
from lamina.custom_ops.all_reduce.thread_group import ThreadGroup

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


def as_threads(size: int, work: Callable[[Group], T]) -> list[T]:
    """What each rank's work returns, in order; the first error of any, with the others let go."""
    group = ThreadGroup(size, timeout=240.0)
    errors: list[BaseException] = []
    lock = threading.Lock()

    def run(rank: Group) -> T | None:
        try:
            with group_of_thread(rank):
                return work(rank)
        except BaseException as error:
            with lock:
                errors.append(error)
            group.abort()
            return None

    with ThreadPoolExecutor(max_workers=size) as pool:
        results = list(pool.map(run, group.ranks))
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


def as_processes(size: int, work: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """What `work(group, *args)`, a function of a module, returns in each of as many new processes."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    meeting = f"file://{folder}/meeting"
    processes = [
        context.Process(target=_rank, args=(meeting, rank, size, pipes[rank][1], work, args), daemon=True)
        for rank in range(size)
    ]
    sys.path.insert(0, str(ROOT))  # new processes inherit it
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
    finally:
        sys.path.remove(str(ROOT))
    try:
        answers = [_answer(receiver) for receiver, _ in pipes]
    finally:
        for process in processes:
            process.join(60)
            process.kill()
            process.join()
            process.close()
        for receiver, _ in pipes:
            receiver.close()
    failed = [text for text, _ in answers if text]
    assert not failed, failed[0]
    return [value for _, value in answers]


def _answer(receiver: Any) -> tuple[str, Any]:
    try:
        return receiver.recv() if receiver.poll(240) else ("a rank did not answer", None)
    except EOFError:
        return "a rank ended without an answer", None


def _rank(meeting: str, rank: int, size: int, answer: Any, work: Callable[..., Any], args: Any) -> None:
    try:
        group = GlooGroup(meeting, rank=rank, size=size, timeout=120.0)
        set_group(group)
        try:
            answer.send(("", work(group, *args)))
        finally:
            group.close()
    except BaseException:
        answer.send((traceback.format_exc(), None))
    finally:
        answer.close()
