"""`python -m lamina` and `lamina`: the command line."""

from .common.interrupts import exit_on_interrupt


def main() -> None:
    """Run the command line; Ctrl-C ends it from the first import on."""
    exit_on_interrupt()
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
