"""The command line: `lamina generate | chat | warmup | cache | explain | verify | info | replay`."""

import sys

import typer

from ..common.errors import LaminaError
from . import cache, chat, explain, generate, info, replay, verify, warmup

# Heavy imports (torch, the runtime) happen inside the commands, so that --help answers at once.
app = typer.Typer(
    name="lamina",
    help="Run LLaMA-family models, compiled.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(warmup.warmup)
app.add_typer(cache.app, name="cache")
app.command()(explain.explain)
app.command()(verify.verify)
app.command()(info.info)
app.command()(replay.replay)


def main() -> None:
    """Run the command line; an error Lamina raises on purpose is one message and exit code 2."""
    try:
        app(prog_name="lamina")
    except LaminaError as error:
        typer.echo(f"lamina: {error}", err=True)
        sys.exit(2)
