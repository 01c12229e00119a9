"""What calls have made of all engines, so that one that is started anew can be made the same."""

from typing import Any

from ..protocol.core_messages import Call, Reply


class KeptState:
    """Adapters, weights and sleep of a set of engines that are alike."""

    def __init__(self) -> None:
        self.is_asleep = False
        self.version = 0  # grows with every change
        self._adapters: dict[str, str] = {}  # folders by digest
        self._weights: tuple[Any, ...] | None = None  # the arguments of the last update

    @property
    def obstacle(self) -> str | None:
        """Why an engine cannot be made the same now, None where it can."""
        if self.is_asleep:
            return "the others sleep; it is started anew after wake()"
        if self._weights is not None and self._weights[0] != "folder":
            return "the others' weights came from a trainer; update them all from a folder, or start anew"
        return None

    def note(self, call: Call, reply: Reply) -> None:
        """Takes in a call that all have obeyed, and its reply."""
        match call.method:
            case "load_adapter":
                self._adapters[reply.value["digest"]] = call.arguments[0]
            case "unload_adapter":
                self._adapters.pop(call.arguments[0], None)
            case "update_weights":
                self._weights = call.arguments
            case "sleep" | "wake":
                self.is_asleep = call.method == "sleep"
            case _:
                return
        self.version += 1

    def calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Returns the methods, with their arguments, that make a new engine the same, in order."""
        weights = [] if self._weights is None else [("update_weights", self._weights)]
        return weights + [("load_adapter", (folder,)) for folder in self._adapters.values()]
