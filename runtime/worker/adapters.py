"""The adapters of a worker: those that the host's memory keeps, and the device's slots that steps read."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...common.errors import LaminaError, RequestError
from ...common.logging import get_logger
from ...compiler.execution.cpu_call_graph import CpuCallGraphs
from ...models.adapters.adapter import AdaptedProjection, Adapter, read_adapter, share_of
from ...models.adapters.slots import TOKEN_SLOTS, SlotLayout
from ...models.quantization.model_schemes import ModelSchemes
from ..protocol.scheduler_output import NO_ADAPTER, AdapterLoad, SchedulerOutput
from .graph_runner import Forward
from .staging import send_to

logger = get_logger("runtime")


class Adapted(NamedTuple):
    """What steps with adapters are computed by: a forward that reads the slots of these adapters."""

    forward: Forward
    cpu_call_graphs: CpuCallGraphs | None
    adapters: "Adapters"


@dataclass(slots=True)
class _Known:
    """An adapter that was loaded, wherever its weights are now."""

    path: Path
    adapter: Adapter | None  # None: to be read again


class Adapters:
    """Adapters by the digest of their bytes, as plans name them.

    The host keeps those of live requests, and of others as many as it may, the ones used last. One that is
    unloaded goes once no live request has it. In the slots, whose tensors a plan reads, lies what plans have
    loaded there.
    """

    def __init__(
        self,
        schemes: ModelSchemes,
        layout: SlotLayout,
        *,
        rank: int,
        max_held: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """max_held: adapters that the host's memory keeps beside those of live requests.

        rank: whose part of each adapter is kept, where schemes share the model out.
        """
        self._schemes, self._rank, self._layout, self._max_held = schemes, rank, layout, max_held
        self._dtype, self._device = dtype, device
        self.tensors: dict[str, Tensor] = {
            name: torch.zeros(shape, dtype=kind, device=device)
            for name, (shape, kind) in layout.table(dtype).items()
        }
        self._token_slots = self.tensors[TOKEN_SLOTS].fill_(NO_ADAPTER)
        self._known: dict[str, _Known] = {}  # those used longest ago first
        self._unloaded: set[str] = set()  # to go with the last request that has them
        self._holders: dict[str, str] = {}  # the adapter of each live request that has one

    def load(self, path: str) -> dict[str, Any]:
        """Read an adapter's folder and keep it; what it is, as plain data: digest, rank and modules.

        LoadError, ConfigError or UnsupportedError where it cannot be served.
        """
        adapter = self._read(Path(path).expanduser())
        self._keep(adapter.digest, Path(path).expanduser(), adapter)
        return {"digest": adapter.digest, "rank": adapter.rank, "modules": list(adapter.modules)}

    def unload(self, digest: str) -> None:
        """Forget an adapter, once no live request has it."""
        if digest in self._known:
            self._unloaded.add(digest)
            self._drop_unloaded()

    def hold(self, request_id: str, digest: str) -> None:
        """Keep an adapter for a request. RequestError where it was unloaded, or its files have changed."""
        known = self._known.get(digest)
        if known is None or digest in self._unloaded:
            raise RequestError("the adapter of this request was unloaded; load it again")
        if known.adapter is None:
            known.adapter = self._read_again(digest, known.path)
        self._keep(digest, known.path, known.adapter)
        self._holders[request_id] = digest

    def release(self, request_id: str) -> None:
        """A request has ended, or has none."""
        if self._holders.pop(request_id, None) is not None:
            self._drop_unloaded()
            self._make_room()

    def begin(self, plan: SchedulerOutput, num_padded: int) -> None:
        """Have the device read a step's adapters, which has so many tokens with its padding."""
        assert plan.adapters is not None
        for load in plan.adapters.loads:
            self._load_slot(load)
        values = np.full(num_padded, NO_ADAPTER, np.int32)
        values[: plan.num_tokens] = np.repeat(plan.adapters.slots, plan.num_scheduled_tokens)
        send_to(self._token_slots, values)

    @property
    def num_held(self) -> int:
        """Adapters whose weights are in the host's memory."""
        return sum(known.adapter is not None for known in self._known.values())

    def _load_slot(self, load: AdapterLoad) -> None:
        adapter = self._known[load.digest].adapter
        assert adapter is not None, "an adapter of a live request that nobody keeps"
        for name in self._layout.rows:
            slots, own = self._layout.of(name, self.tensors), adapter.projections.get(name)
            if own is None:
                slots.scales[load.slot].zero_()
                continue
            for tensor, values in zip(slots, own, strict=True):
                tensor[load.slot].copy_(values, non_blocking=True)

    def _read(self, path: Path) -> Adapter:
        specs, max_rank = self._schemes.whole_specs, self._layout.rank
        whole = read_adapter(path, specs, max_rank=max_rank, dtype=self._dtype)
        adapter = share_of(whole, self._schemes, self._rank)
        if self._device.type != "cuda":
            return adapter
        pinned = {
            name: AdaptedProjection(*[tensor.pin_memory() for tensor in one])
            for name, one in adapter.projections.items()
        }
        return Adapter(digest=adapter.digest, rank=adapter.rank, modules=adapter.modules, projections=pinned)

    def _read_again(self, digest: str, path: Path) -> Adapter:
        try:
            adapter = self._read(path)
        except LaminaError as error:
            raise RequestError(f"an adapter could not be read again: {error}") from error
        if adapter.digest != digest:
            raise RequestError(f"{path} has changed since it was loaded; load it again")
        return adapter

    def _keep(self, digest: str, path: Path, adapter: Adapter) -> None:
        self._known.pop(digest, None)
        self._known[digest] = _Known(path, adapter)
        self._unloaded.discard(digest)
        self._make_room(keep=digest)

    def _make_room(self, keep: str | None = None) -> None:
        """Let go of weights that were used longest ago, of those that no live request has."""
        used, beyond = Counter(self._holders.values()), self.num_held - self._max_held
        for digest, known in self._known.items():
            if beyond > 0 and known.adapter is not None and digest != keep and not used[digest]:
                known.adapter, beyond = None, beyond - 1

    def _drop_unloaded(self) -> None:
        for digest in self._unloaded - {*self._holders.values()}:
            del self._known[digest]
            self._unloaded.discard(digest)
