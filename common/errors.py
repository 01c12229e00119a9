"""The exception tree.

LaminaError
├── ConfigError (ValueError)        a setting that cannot be honoured
│   └── UnknownSettingError (TypeError)      a setting that there is not
├── RequestError (ValueError)       a prompt or sampling parameter that cannot be honoured
│   ├── UnknownParameterError (TypeError)    a parameter that there is not
│   ├── UnknownAdapterError         the name of an adapter that is not loaded
│   ├── PromptTooLongError          a prompt that the context or the KV cache has no room for
│   └── ProcessorError              a logits processor of a request failed
├── EngineError                     a step failed at one request, which ended
├── DrainedError                    a request took longer than a model that made room for another had
├── EngineDeadError                 a core, or its workers, are lost, and every request with them
├── GroupError                      a rank of a model that is spread over several is lost or late
├── WireError                       data between the engine's process and this one that is damaged
├── ShapeError (ValueError)         a tensor whose shape, dtype or device does not fit an op
├── LoadError                       a model folder or file that is missing, damaged or incomplete
├── LogitsError                     a model computed logits by which no token can be chosen
├── UnsupportedError                something Lamina does not do, or not on this machine
├── OutOfBlocksError                the KV cache has too few free blocks
├── CompileError                    capture, a pass or code generation failed
│   └── NotWarmError                something would have to be compiled where only loading is allowed
├── KernelBuildError                a native kernel did not build
├── KernelLaunchError               a device refused to start a kernel
├── StoreError                      an object of the store is missing or damaged
└── ClosedError                     use of a runtime after close()
"""

import reprlib
from typing import Any

MOST_SHOWN = 80  # characters of a value in the text of an error
MOST_SAID = 4000  # characters of such a text, whatever it quotes


def shown(value: object, most: int = MOST_SHOWN) -> str:
    """A value in few characters: even a huge one, or one of a class whose own repr raises."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write the longest
    try:
        writer = reprlib.Repr()
        writer.maxstring = writer.maxother = writer.maxlong = most
        writer.maxdict = writer.maxlist = writer.maxtuple = 8
        text = writer.repr(value)
    except BaseException:  # somebody else's program: anything may come out of it, SystemExit too
        text = object.__repr__(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def clipped(text: str, most: int = MOST_SAID) -> str:
    """A text without its middle where it is longer: names stand at the beginning, remedies at the end."""
    if len(text) <= most:
        return text
    head, tail = most * 3 // 4, most // 4
    return f"{text[:head]} [... {len(text) - head - tail} characters ...] {text[-tail:]}"


class LaminaError(Exception):
    """Base of every error raised on purpose by Lamina; its text is never longer than anybody reads."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(clipped(arg) if isinstance(arg, str) else arg for arg in args))

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(kind: type[LaminaError], args: tuple[Any, ...], state: dict[str, Any]) -> LaminaError:
    """An error as it was, without calling its own __init__, which may want more than the message."""
    error: LaminaError = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(LaminaError, ValueError):
    """A setting that cannot be honoured."""


class UnknownSettingError(ConfigError, TypeError):
    """A setting that there is not, as Python's own TypeError for an unknown argument."""


class RequestError(LaminaError, ValueError):
    """A prompt or sampling parameter that cannot be honoured; other requests go on."""


class UnknownParameterError(RequestError, TypeError):
    """A parameter of a request that there is not, as Python's own TypeError for an unknown argument."""


class UnknownAdapterError(RequestError):
    """The name of an adapter that is not loaded."""


class PromptTooLongError(RequestError):
    """A prompt that the context, or the whole KV cache, has no room for."""


class ProcessorError(RequestError):
    """A logits processor of a request failed; other requests go on."""

    def __init__(self, message: str, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


class LogitsError(LaminaError):
    """A model computed logits by which no token of a request can be chosen; other requests go on."""


class EngineError(LaminaError):
    """A step, or the text of an answer, failed at one request, which ended; other requests go on."""


class DrainedError(LaminaError):
    """A request took longer than a model that made room for another had."""


class EngineDeadError(LaminaError):
    """The core of an AsyncRuntime, or a worker, is lost: every request ended, and no other can be served."""


class GroupError(LaminaError):
    """A rank that a model is spread over is lost or late, or does something else than the others."""


class WireError(LaminaError):
    """Data between the engine's process and this one that is damaged, or cannot be sent."""


class ShapeError(LaminaError, ValueError):
    """A tensor whose shape, dtype or device does not fit an op."""


class LoadError(LaminaError):
    """A model folder or file that is missing, damaged or incomplete."""


class UnsupportedError(LaminaError):
    """Something Lamina does not do, or cannot do on this machine."""


class OutOfBlocksError(LaminaError):
    """The KV cache has too few free blocks."""


class CompileError(LaminaError):
    """Capture, a pass or code generation failed."""


class NotWarmError(CompileError):
    """Something would have to be compiled where only loading is allowed."""


class KernelBuildError(LaminaError):
    """A native kernel did not build."""


class KernelLaunchError(LaminaError):
    """A device refused to start a kernel, or reports an earlier fault."""


class StoreError(LaminaError):
    """An object of the store is missing or damaged."""


class ClosedError(LaminaError):
    """A runtime was used after close()."""
