"""A store of its own for a test or for a module's tests; and what was proved, in numbers."""

import pytest

from lamina.common.store import Store

from .tally import PROVED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The numbers behind "plans are right" and "the passes are proved", where such tests have run."""
    if PROVED["surroundings"]:
        terminalreporter.section("plans")
        terminalreporter.write_line(f"{PROVED['surroundings']} surroundings, each with the right plan")
    if PROVED["programs"] or PROVED["faults"]:
        terminalreporter.section("passes")
        terminalreporter.write_line(
            f"{PROVED['programs']} programs, {PROVED['planted']} sites planted, {PROVED['found']} found; "
            f"{PROVED['caught']} of {PROVED['faults']} faults put into passes caught"
        )


@pytest.fixture(scope="module", autouse=True)
def _build_once(build_once):
    """For all of these tests."""


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    """One store for a module: what one test has compiled another loads."""
    return Store(tmp_path_factory.mktemp("store"))
