"""`lamina chat`: a conversation in the terminal."""

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.errors import RequestError
from . import options
from .streaming import print_stream

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime
    from ..runtime.sampling_params import SamplingParams

System = Annotated[str | None, typer.Option(help="A system message to open the conversation with.")]
HELP = "/reset starts over, /exit or Ctrl-D leaves; Ctrl-C stops an answer."


def chat(
    model: options.Model,
    system: System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = None,
    compile: options.Compile = True,
    numerics: options.Numerics = "fast",
    max_model_len: options.MaxModelLen = None,
    cache_dir: options.CacheDir = None,
    without_pass: options.WithoutPass = None,
) -> None:
    """Talk with a model: /reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."""
    params = options.sampling_params(max_tokens, temperature, top_k, top_p, min_p, seed)
    runtime_options = options.RuntimeOptions(
        model=model,
        dtype=dtype,
        device=device,
        quantization=quantization,
        compile=compile,
        numerics=numerics,
        max_model_len=max_model_len,
        cache_dir=cache_dir,
        without_pass=without_pass,
    )
    with runtime_options.open() as runtime:
        typer.echo(HELP, err=True)
        Conversation(runtime, params, system).run()


class Conversation:
    """The messages so far; only a finished or stopped answer joins them."""

    def __init__(self, runtime: "Runtime", params: "SamplingParams", system: str | None) -> None:
        self.runtime = runtime
        self.params = params
        self.opening = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self.opening)

    def run(self) -> None:
        """Read and answer until /exit, Ctrl-D, or Ctrl-C at the prompt."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (imported for its line editing)
        while (line := self._read()) is not None:
            command = line.strip()
            if command == "/exit":
                break
            if command == "/reset":
                self.messages = list(self.opening)
            elif command.startswith("/"):
                typer.echo(f"unknown command {command}. {HELP}", err=True)
            elif command:
                self._turn(line)

    def _read(self) -> str | None:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None

    def _turn(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = print_stream(self.runtime.stream_chat(messages, self.params)).text
        except RequestError as error:  # such as a conversation too long for the model
            typer.echo(f"lamina: {error}", err=True)
        else:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
