"""Folders for work in progress."""

import shutil
from pathlib import Path

import pytest

from lamina.common.scratch import private_folder


def test_an_interrupt_while_a_folder_is_removed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, calls = shutil.rmtree, []

    def interrupted_once(path: Path, *, ignore_errors: bool) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        remove(path, ignore_errors=ignore_errors)

    def work() -> None:
        with private_folder(tmp_path) as folder:
            (folder / "half").write_text("of it")
            monkeypatch.setattr(shutil, "rmtree", interrupted_once)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert [*tmp_path.iterdir()] == []
