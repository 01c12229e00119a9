"""The Ray cluster that this process has joined: one that was there, or one of its own while it is used."""

import logging
import os
import sys
import threading
from importlib import import_module
from typing import Any

from ...common import env
from ...common.errors import EngineDeadError, UnsupportedError, shown
from ...common.extras import require
from ...common.logging import get_logger
from ...common.scratch import TemporaryFolder

logger = get_logger("runtime")
OBJECT_STORE_BYTES = 128 << 20  # of a cluster of its own: what is sent there is small
NUM_CPUS = 1024  # of a cluster of its own, which nobody else asks for any
NUM_STARTS = 4  # of such a one, at most: Ray gives up after half a minute, busy as the machine may be
SECONDS_TO_LEAVE = 30.0


class RayCluster:
    """The cluster of this process while somebody uses it; what the process had joined before stays joined."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._keeper: _Keeper | None = None

    def join(self) -> None:
        """Use a cluster: that of RAY_ADDRESS, or one of its own where it is not set; leave() once done.

        UnsupportedError where the package is missing, EngineDeadError where the cluster cannot be joined.
        """
        address = _address()
        ray = require("ray", extra="ray")
        with self._lock:
            if not ray.is_initialized():
                self._keeper = _joined(address)
            self._num_users += 1

    def leave(self) -> None:
        """Use it no more; the last one ends what join() has begun."""
        with self._lock:
            self._num_users -= 1
            keeper = self._keeper
            if self._num_users == 0 and keeper is not None:
                self._keeper = None
                keeper.end()

    def actor_env(self) -> dict[str, str]:
        """Variables of the environment for actors: on this machine they find modules where this process does.

        On a cluster that was there every node has an installation of its own.
        """
        if self._keeper is None or not self._keeper.is_own:
            return {}
        return {"PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}


def _joined(address: str | None) -> "_Keeper":
    """Who keeps this process in a cluster; one of its own may need several starts where much else runs."""
    for _ in range(NUM_STARTS - 1 if address is None else 0):
        keeper = _Keeper(None)
        try:
            keeper.wait_until_joined()
        except EngineDeadError as error:
            logger.warning("%s; it is started again", error)
        else:
            return keeper
    keeper = _Keeper(address)
    keeper.wait_until_joined()
    return keeper


class _Keeper(threading.Thread):
    """Joins a cluster, and leaves it once it is asked to.

    The kernel ends the processes of a cluster of its own with the thread that started them, so that thread
    stays. Ray sets handlers of signals in the main thread alone, which are those of whoever runs it.
    """

    def __init__(self, address: str | None) -> None:
        super().__init__(name="lamina-ray", daemon=True)
        self.is_own = address is None
        self._address = address
        self._folder: TemporaryFolder | None = None  # of a cluster of its own
        self._error: Exception | None = None
        self._is_joined, self._is_to_end = threading.Event(), threading.Event()

    def wait_until_joined(self) -> None:
        """Start, and return once the cluster is joined. EngineDeadError where it cannot be."""
        try:
            self.start()
            self._is_joined.wait()
        except BaseException:
            self._is_to_end.set()
            raise
        if self._error is not None:
            self.end()
            which = "no Ray cluster can be started" if self.is_own else f"no Ray cluster at {self._address!r}"
            raise EngineDeadError(f"{which}: {shown(self._error, 500)}") from self._error

    def end(self) -> None:
        """Leave the cluster, and end it if it is its own."""
        self._is_to_end.set()
        self.join(SECONDS_TO_LEAVE)
        if self._folder is not None:
            self._folder.remove()

    def run(self) -> None:
        """Joined until it is to end."""
        ray = import_module("ray")
        try:
            if self.is_own:
                self._folder = TemporaryFolder("ray")
            _init(ray, self._address, None if self._folder is None else str(self._folder.path))
        except Exception as error:  # somebody else's code: anything may come out of it
            self._error = error
            self._is_to_end.set()
        self._is_joined.set()
        self._is_to_end.wait()
        ray.shutdown()


def _address() -> str | None:
    """The address of RAY_ADDRESS. UnsupportedError for that of a Ray Client, which is not joined by it."""
    address = env.ray_address()
    if address is not None and "://" in address:
        raise UnsupportedError(f"RAY_ADDRESS is {shown(address)}; wanted host:port of a cluster, or auto")
    return None if address == "local" else address


def _init(ray: Any, address: str | None, folder: str | None) -> None:
    quiet: dict[str, Any] = {"logging_level": logging.ERROR}  # that no handlers of signals are set is meant
    if address is not None:
        logger.info("joining the Ray cluster at %s", address)
        ray.init(address=address, **quiet)
        return
    logger.info("starting a Ray cluster on this machine, as RAY_ADDRESS is not set")
    env.ray_of_its_own()
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=folder,
        **quiet,
    )


CLUSTER = RayCluster()
