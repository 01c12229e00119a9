"""Options of every command, made from the typed configs, and what is made of them."""

import ast
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from .fields import Field, read_fields, read_schemes

if TYPE_CHECKING:
    from ..runtime.config import RuntimeConfig
    from ..runtime.runtime import Runtime
    from ..runtime.sampling_params import SamplingParams

Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A model folder, a .gguf file or a hub id.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
CacheDir = Annotated[Path | None, typer.Option(help="Where compiled code and converted models are kept.")]

# Of fields that take one of a few values; checked against those in tests.
CHOICES = {
    "dtype": ("auto", "bfloat16", "float16", "float32", "float64"),
    "kv_cache_dtype": ("auto", "fp8", "int8"),
    "device": ("auto", "cpu", "cuda"),
    "quantization": read_schemes(),
    "numerics": ("fast", "exact"),
    "attention": ("auto", "cuda", "triton", "flash_attn", "cpu", "reference"),
    "pooling": ("auto", "last", "mean", "cls"),
    "load_format": ("auto", "dummy"),
    "executor": ("auto", "uniproc", "multiproc", "ray"),
    "ray_placement": ("strict_pack", "pack", "spread", "strict_spread"),
}
TYPES = {"int": int, "float": float, "bool": bool, "str": str}
REPEATED = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")  # and what is a tuple
# What the command line has no use for, or other words.
NOT_SETTINGS = ("model", "seed", "compile")
OF_COMPILING = ("batch_invariant",)  # fields of the CompileConfig that are options
NOT_SAMPLING = ("logit_bias", "logits_processors", "structured_outputs", "detokenize")
OF_SEVERAL = ("n", "best_of", "logprobs", "prompt_logprobs")


class Settings(dict[str, Any]):
    """Settings of a runtime as given on the command line, by the names of RuntimeConfig."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options, in the order of the fields; what is not given is left to the config."""
        model = Annotated[str | None, typer.Option("--model", "-m", help="MODEL, in this other way.")]
        without = "Leave out a pass of the compiler by its name; may be repeated."
        return [
            _parameter("model_option", model),
            *(_option(field) for field in OF_MODELS),
            _parameter("compile", _typed(bool, "Compile the model, or run it eagerly.")),
            _parameter("without_pass", _typed(list[str], without)),
            *(_option(field) for field in COMPILING if field.name in OF_COMPILING),
        ]

    def config(self, model: str | None, **more: Any) -> "RuntimeConfig":
        """The checked config for a model that is given as an argument, or else as an option."""
        given = {"model": self.model(model), **self.given(more.pop("verify", True)), **more}
        from ..runtime.config import RuntimeConfig

        return RuntimeConfig(**given)

    def given(self, verify: bool = True) -> dict[str, Any]:
        """The settings that were given, beside the model, as RuntimeConfig takes them."""
        given = {name: _plain(value) for name, value in self.items() if value is not None}
        given.pop("model_option", None)
        words = {name: given.pop(name) for name in OF_COMPILING if name in given}
        compiled = compile_setting(
            given.pop("compile", True), given.pop("without_pass", None), verify, **words
        )
        return {**given, "compile": compiled}

    def model(self, argument: str | None) -> str:
        """The model by whichever way it was named; typer.BadParameter where both were used, or neither."""
        option = self["model_option"]
        if option is not None and argument is not None:
            raise typer.BadParameter(f"it is given twice, {argument!r} and {option!r}", param_hint="MODEL")
        if option is None and argument is None:
            raise typer.BadParameter("wanted a model folder, a .gguf file or a hub id", param_hint="MODEL")
        return str(argument if option is None else option)

    def split(self, words: Sequence[str]) -> tuple[str, list[str]]:
        """MODEL PROMPT..., or with --model PROMPT... alone."""
        option, self["model_option"] = self["model_option"], None
        if option is not None:
            return option, list(words)
        if len(words) == 1:
            raise typer.BadParameter(
                f"{words[0]!r} is taken for the model; give PROMPT after it, or --model MODEL PROMPT",
                param_hint="PROMPT",
            )
        return words[0], list(words[1:])

    def open(self, model: str | None) -> "Runtime":
        """A runtime that answers texts, with its progress on standard error."""
        config = self.config(model)
        from .progress import loading_progress

        with loading_progress() as progress:
            from ..runtime.runtime import Runtime
            from ..runtime.startup.loader import resolve_runtime
            from ..runtime.tokenization.tokenizer import require_tokenizer

            if config.tokenizer is None:  # said before anything is compiled
                require_tokenizer(resolve_runtime(config, progress).folder)
            return Runtime(config, progress)


class Sampling(dict[str, Any]):
    """Sampling parameters as given on the command line, by the names of SamplingParams."""

    WITHOUT: tuple[str, ...] = NOT_SAMPLING

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options, in the order of the fields."""
        return [_option(field) for field in SAMPLING if field.name not in cls.WITHOUT]

    def params(self) -> "SamplingParams":
        """The checked parameters, before anything is loaded; RequestError for a value they cannot have."""
        from ..runtime.sampling_params import SamplingParams

        return SamplingParams(**{name: value for name, value in self.items() if value is not None})


class SamplingOfOne(Sampling):
    """The same where there is one answer, as text."""

    WITHOUT = NOT_SAMPLING + OF_SEVERAL


class Serving(dict[str, Any]):
    """How to serve, as given on the command line, by the names of ServeConfig."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options, in the order of the fields; what is not given is left to the config."""
        return [_option(field) for field in SERVING]

    def given(self) -> dict[str, Any]:
        """The options that were given, as ServeConfig takes them."""
        return {name: value for name, value in self.items() if value is not None}


class RayReplicas(dict[str, Any]):
    """Replicas behind Ray Serve, as given on the command line: --ray-min-replicas is min_replicas."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options, in the order of the fields."""
        return [_option(replace(field, name=f"{RAY}{field.name}")) for field in REPLICAS]

    def given(self) -> dict[str, Any]:
        """The options that were given, as RayServeConfig takes them."""
        return {name.removeprefix(RAY): value for name, value in self.items() if value is not None}


SETTINGS = read_fields("runtime/config.py", "RuntimeConfig")
SAMPLING = read_fields("runtime/sampling_params.py", "SamplingParams")
COMPILING = read_fields("compiler/config.py", "CompileConfig")
SERVING = read_fields("serving/config.py", "ServeConfig")
REPLICAS = read_fields("serving/ray_config.py", "RayServeConfig")
RAY = "ray_"  # before the names of those options
OF_MODELS = tuple(field for field in SETTINGS if field.name not in NOT_SETTINGS)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters of type Settings, Serving, Sampling and the like are so many options."""
    own = inspect.signature(command).parameters.values()
    bags = {
        each.name: each.annotation
        for each in own
        if each.annotation in (Settings, Serving, RayReplicas, Sampling, SamplingOfOne)
    }
    options = {name: kind.parameters() for name, kind in bags.items()}
    plain = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own if each.name not in bags]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        taken = {
            name: bags[name]({each.name: given.pop(each.name) for each in parameters})
            for name, parameters in options.items()
        }
        command(**given, **taken)

    parameters = [*plain, *(each for name in bags for each in options[name])]
    del run.__wrapped__  # whoever reads the signature is to see the options
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def compile_setting(
    compile: bool, without_pass: list[str] | None, verify: bool = True, *, batch_invariant: bool = False
) -> Any:
    """The compiler's settings with some passes left out; ConfigError for a pass that there is not.

    typer.BadParameter for batch_invariant without a compiler.
    """
    if not compile and batch_invariant:
        raise typer.BadParameter(
            "a model that is not compiled has no such mode", param_hint="--batch-invariant"
        )
    if not compile or (verify and not without_pass and not batch_invariant):
        return compile
    from ..compiler.config import CompileConfig
    from ..compiler.passes.pipeline import all_but

    passes = all_but(*without_pass) if without_pass else None
    return CompileConfig(passes=passes, verify=verify, batch_invariant=batch_invariant)


def _option(field: Field) -> inspect.Parameter:
    """A field as an option that is None unless given; its help has the default that then holds."""
    default = ast.literal_eval(field.default or "None")
    default = None if default in ((), "") else default
    if isinstance(default, bool):
        return _parameter(field.name, _flag(field, default))
    return _parameter(field.name, _typed(_type(field), field.sentence, default))


def _flag(field: Field, default: bool) -> Any:
    """Only the word that changes something is shown."""
    name = field.name.replace("_", "-")
    names = f"--{name}/--no-{name}" if default else f"--{name}"
    return Annotated[bool | None, typer.Option(names, help=field.sentence, show_default=False)]


def _type(field: Field) -> Any:
    if field.name in CHOICES:
        return Enum(field.name, {choice: choice for choice in CHOICES[field.name]}, type=str)
    name = "int" if field.name.endswith("_ids") else field.type.split(" |")[0]
    kind = TYPES.get(name, str)
    is_repeated = field.name in REPEATED or field.type.startswith("tuple")
    return list[kind] if is_repeated else kind  # type: ignore[valid-type]


def _typed(kind: Any, text: str, default: Any = None) -> Any:
    if get_origin(kind) is list and "repeated" not in text:
        text += " May be repeated."
    full = text if default is None else f"{text}  [default: {default}]"
    return Annotated[kind | None, typer.Option(help=full, show_default=False)]


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
