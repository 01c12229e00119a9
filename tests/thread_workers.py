"""Workers of a runtime as threads of this process: their loops, messages and stages, without processes."""

import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lamina.common.errors import EngineDeadError, GroupError
from lamina.custom_ops.all_reduce.group import group_of_thread
from lamina.custom_ops.all_reduce.thread_group import ThreadGroup
from lamina.runtime.executor.worker_loop import WorkerLoop, as_known
from lamina.runtime.executor.workers import Receive, lost_workers
from lamina.runtime.parallel import ParallelConfig
from lamina.runtime.protocol import wire
from lamina.runtime.protocol.core_messages import Shutdown
from lamina.runtime.protocol.process_messages import CoreLost
from lamina.runtime.startup import over_processes
from lamina.runtime.startup.ranks import open_rank
from lamina.runtime.worker.model_runner import ModelRunner

SECONDS = 120.0
OnRunner = Callable[[int, ModelRunner], None]  # (rank, what it runs steps with)


class ThreadWorkers:
    """See Workers. Ranks are of thread groups: all of them, and those of each stage."""

    def __init__(
        self, num_workers: int, receive: Receive, *, parallel: ParallelConfig, on_runner: OnRunner
    ) -> None:
        self.lost: EngineDeadError | None = None
        self.num_workers, self.pids = num_workers, (None,) * num_workers
        self._receive, self._on_runner = receive, on_runner
        self._said: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self._brought: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(num_workers)]
        size = parallel.tensor_parallel
        self._groups = [ThreadGroup(num_workers, timeout=SECONDS)]
        self._groups += [ThreadGroup(size, timeout=SECONDS) for _ in range(parallel.pipeline_parallel)]
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(rank, self._groups[1 + rank // size].ranks[rank % size], parallel.answering_rank),
                daemon=True,
            )
            for rank in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, rank: int, own: Any, answering_rank: int) -> None:
        def send(message: Any) -> None:
            self._said.put((rank, wire.encode(message)))

        def take(seconds: float | None) -> Any:
            try:
                return wire.decode(self._brought[rank].get(timeout=seconds))
            except queue.Empty:
                return None

        start = take(None)
        if isinstance(start, Shutdown):
            return
        try:
            with group_of_thread(own, self._groups[0].ranks[rank]):
                loaded = open_rank(pickle.loads(start.config), lambda *args: None)
                self._on_runner(rank, loaded.worker.runner)
                send(loaded.ready)
                WorkerLoop(
                    loaded.worker.runner,
                    loaded.facts,
                    answers=rank == answering_rank,
                    take=take,
                    send=send,
                    on_build=loaded.worker.late_builds,
                ).run()
        except BaseException as error:
            for group in self._groups if not isinstance(error, GroupError) else ():
                group.abort()
            send(CoreLost(error=as_known(error)))

    def send(self, message: Any) -> None:
        self.check()
        frame = wire.encode(message)
        for brought in self._brought:
            brought.put(frame)

    def wait(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_done():
            self.check()
            try:
                rank, frame = self._said.get(timeout=0.1)
            except queue.Empty:
                assert time.monotonic() < deadline, "workers say nothing"
            else:
                self._receive(rank, wire.decode(frame))

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def look(self) -> None:
        while not self._said.empty():
            rank, frame = self._said.get()
            self._receive(rank, wire.decode(frame))
        self.check()

    def lose(self, why: str) -> None:
        self.lost = lost_workers(why)
        for group in self._groups:
            group.abort()
        self.end(0)

    def end(self, timeout: float = SECONDS) -> None:
        for brought in self._brought:
            brought.put(wire.encode(Shutdown()))
        for thread in self._threads if timeout else ():
            thread.join(timeout)


@contextmanager
def thread_workers(on_runner: OnRunner = lambda rank, runner: None) -> Iterator[None]:
    """While it lasts, runtimes over several ranks have threads in place of processes."""

    def starter(resolved: Any, num_threads: int) -> Any:
        parallel = resolved.config.parallel
        return lambda num, receive: ThreadWorkers(num, receive, parallel=parallel, on_runner=on_runner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(over_processes, "_starter", starter)
        yield
