"""The exception tree.

LaminaError
├── ConfigError (ValueError)        a setting that cannot be honoured
│   └── UnknownSettingError (TypeError)      a setting that there is not
├── RequestError (ValueError)       a prompt or sampling parameter that cannot be honoured
│   ├── UnknownParameterError (TypeError)    a parameter that there is not
│   └── ProcessorError              a logits processor of a request failed
├── ShapeError (ValueError)         a tensor whose shape, dtype or device does not fit an op
├── LoadError                       a model folder or file that is missing, damaged or incomplete
├── UnsupportedError                something Lamina does not do, or not on this machine
├── OutOfBlocksError                the KV cache has too few free blocks
├── CompileError                    capture, a pass or code generation failed
│   └── NotWarmError                something would have to be compiled where only loading is allowed
├── KernelBuildError                a native kernel did not build
├── KernelLaunchError               a device refused to start a kernel
├── StoreError                      an object of the store is missing or damaged
└── ClosedError                     use of a runtime after close()
"""


class LaminaError(Exception):
    """Base of every error raised on purpose by Lamina."""


class ConfigError(LaminaError, ValueError):
    """A setting that cannot be honoured."""


class UnknownSettingError(ConfigError, TypeError):
    """A setting that there is not, as Python's own TypeError for an unknown argument."""


class RequestError(LaminaError, ValueError):
    """A prompt or sampling parameter that cannot be honoured; other requests go on."""


class UnknownParameterError(RequestError, TypeError):
    """A parameter of a request that there is not, as Python's own TypeError for an unknown argument."""


class ProcessorError(RequestError):
    """A logits processor of a request failed; other requests go on."""

    def __init__(self, message: str, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


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
