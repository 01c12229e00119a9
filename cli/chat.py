"""`lamina chat`: a conversation in the terminal."""

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.errors import RequestError
from . import options
from .interrupt import RaiseOnInterrupt
from .standard_streams import read_line
from .streaming import print_stream

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime
    from ..runtime.sampling_params import SamplingParams

System = Annotated[str | None, typer.Option(help="A system message to open the conversation with.")]
HELP = "/reset starts over, /exit or Ctrl-D leaves; Ctrl-C stops an answer, or clears the line."


@options.spread
def chat(
    sampling: options.SamplingOfOne,
    settings: options.Settings,
    model: options.Model = None,
    system: System = None,
) -> None:
    """Talk with a model: /reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."""
    params = sampling.params()
    with settings.open(model) as runtime:
        typer.echo(HELP, err=True)
        chosen = runtime.chat_params(params)
        if chosen != params:
            drawn = f"temperature {chosen.temperature}, top_p {chosen.top_p}"
            typer.echo(f"sampling: {drawn}, since the checkpoint does not say how", err=True)
        Conversation(runtime, params, system).run()


class Conversation:
    """The messages so far; only a finished or stopped answer joins them."""

    def __init__(self, runtime: "Runtime", params: "SamplingParams", system: str | None) -> None:
        self.runtime = runtime
        self.params = params
        self.opening = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self.opening)

    def run(self) -> None:
        """Read and answer until /exit or Ctrl-D; Ctrl-C clears a line that is being written."""
        _edit_lines()
        while (line := self._read()) is not None:
            command = line.strip()
            if command == "/exit":
                break
            if command == "/reset":
                self.messages = list(self.opening)
            elif command.startswith("/") and "\n" not in command:
                typer.echo(f"unknown command {command}. {HELP}", err=True)
            elif command:
                self._turn(line)

    def _read(self) -> str | None:
        """The next message; None where there is no other."""
        while True:
            try:
                with RaiseOnInterrupt():
                    return read_line("> " if sys.stdin and sys.stdin.isatty() else "")
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                print()  # the half line stays to be seen, and a new one begins

    def _turn(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = print_stream(self.runtime.stream_chat(messages, self.params)).text
        except RequestError as error:  # such as a conversation too long for the model
            typer.echo(f"lamina: {error}", err=True)
        else:
            self.messages = [*messages, {"role": "assistant", "content": answer}]


def _edit_lines() -> None:
    """Line editing for input(), where pasted lines stay one message until Enter is pressed.

    GNU readline can do so, but Python switches it off; libedit, which some systems have in its place, cannot.
    """
    with contextlib.suppress(ImportError):
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
