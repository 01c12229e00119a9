"""Which adapter lies in which slot of the device: who needs one gets it, the one unused longest gives way."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..protocol.scheduler_output import NO_ADAPTER, AdapterLoad, StepAdapters
from .request import Request


class AdapterSlots:
    """Slots by adapter, as the device has them once every step that was planned is over.

    Running requests keep their adapter's slot, so at most as many adapters run as there are slots. What
    is loaded is copied on the device's one stream, after all steps that still read what lay there before.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[str, int] = {}  # the one used longest ago first

    def has_room(self, running: Iterable[Request], adapter: str) -> bool:
        """Whether a request with this adapter can run beside these."""
        return len(_adapters(running) | {adapter}) <= self._num_slots

    def assign(self, running: Sequence[Request], num_rows: int) -> StepAdapters | None:
        """The slots of the first rows, and what is to be loaded before; None where none of them has any."""
        wanted = _adapters(running[:num_rows])
        if not wanted:
            return None
        keep, loads = _adapters(running), list[AdapterLoad]()
        for adapter in sorted(wanted):
            slot = self._slots.pop(adapter, None)
            if slot is None:
                slot = self._free_slot(keep)
                loads.append(AdapterLoad(slot, adapter))
            self._slots[adapter] = slot
        slots = [NO_ADAPTER if r.adapter is None else self._slots[r.adapter] for r in running[:num_rows]]
        return StepAdapters(slots=np.array(slots, np.int64), loads=tuple(loads))

    def clear(self) -> None:
        """Nothing is known of what the device has."""
        self._slots.clear()

    def _free_slot(self, keep: set[str]) -> int:
        """A slot in which nothing lies, or what is not to be kept any more."""
        free: set[int] = {*range(self._num_slots)} - {*self._slots.values()}
        if free:
            return min(free)
        unused = next(adapter for adapter in self._slots if adapter not in keep)
        slot: int = self._slots.pop(unused)
        return slot


def _adapters(requests: Iterable[Request]) -> set[str]:
    return {request.adapter for request in requests if request.adapter is not None}
