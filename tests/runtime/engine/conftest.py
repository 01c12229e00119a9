"""What tests of processes share."""

import tempfile

import pytest

from .processes import children, threads


@pytest.fixture
def own_temp(tmp_path, monkeypatch):
    """A folder for temporary files that is to be empty after the test."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    before, alive = threads(), children()
    yield folder
    assert list(folder.iterdir()) == []
    assert threads() <= before
    assert children() <= alive
