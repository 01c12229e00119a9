"""The command line: `lamina generate | chat | serve | warmup | cache | explain | verify | eval | …`."""

import os
import signal
import sys
from typing import Annotated

import typer

from .. import __version__
from ..common.errors import LaminaError
from ..common.interrupts import exit_on_interrupt
from ..common.memory_errors import in_brief, is_out_of_memory
from . import cache, chat, evaluate, explain, generate, info, quantize, replay, serve, verify, warmup
from .option_names import GroupOfCommands
from .standard_streams import OutputError, checked_output

# Heavy imports (torch, the runtime) happen inside the commands, so that --help answers at once.
app = typer.Typer(
    cls=GroupOfCommands,
    name="lamina",
    help="Run LLaMA-family models, compiled.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(warmup.warmup)
app.add_typer(cache.app, name="cache")
app.command()(explain.explain)
app.command()(verify.verify)
app.command("eval")(evaluate.evaluate)
app.command()(quantize.quantize)
app.command()(info.info)
app.command()(replay.replay)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lamina {__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run LLaMA-family models, compiled."""


def main() -> None:
    """Run the command line; an error Lamina raises on purpose, or memory that runs out, is one message and
    exit code 2.

    1 where standard output does not take what was asked for, 130 after Ctrl-C.
    """
    before = exit_on_interrupt()
    try:
        with checked_output():
            _leave_lost_folder()
            app(prog_name="lamina")
    except OutputError as error:
        typer.echo(f"lamina: {error}", err=True)
        sys.exit(1)
    except LaminaError as error:
        typer.echo(f"lamina: {error}", err=True)
        sys.exit(2)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        typer.echo(f"lamina: memory ran out: {in_brief(error)}; give the process more", err=True)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _leave_lost_folder() -> None:
    """Go elsewhere where the current folder was deleted: much of what is imported asks for it."""
    try:
        os.getcwd()
    except OSError:
        typer.echo("lamina: the current folder is gone; paths must begin with /", err=True)
        os.chdir("/")
