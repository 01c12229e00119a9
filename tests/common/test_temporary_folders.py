"""Folders for temporary files: what a process leaves that is ended by force goes when the next one begins."""

import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lamina.common import scratch
from lamina.common.locks import hold
from lamina.common.scratch import TemporaryFolder

HOLD = """
import sys
from lamina.common.scratch import TemporaryFolder
folder = TemporaryFolder("test", sys.argv[1])
(folder.path / "socket").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


def start(base: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder, and where that is."""
    command = [sys.executable, "-c", HOLD, str(base)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_folder_is_of_this_user_alone_until_it_is_removed(tmp_path: Path) -> None:
    folder = TemporaryFolder("test", tmp_path)
    assert folder.path.parent == tmp_path
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "file").touch()
    folder.remove()
    folder.remove()
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_another_start_removes_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock's file is there for a moment before the lock is."""
    removed = []

    def removing(path: Path, **how: bool) -> AbstractContextManager[bool]:
        if not removed:
            removed.append(path.parent)
            path.touch()
            scratch._remove_left(path.parent)
            assert not path.parent.exists()
        return hold(path, **how)

    monkeypatch.setattr(scratch, "hold", removing)
    folder = TemporaryFolder("test", tmp_path)
    assert folder.path.is_dir()
    assert removed != [folder.path]
    folder.remove()


def test_what_a_killed_process_left_goes_with_the_next_start_and_what_others_use_stays(
    tmp_path: Path,
) -> None:
    (living, used), (killed, left) = start(tmp_path), start(tmp_path)
    other_kind = TemporaryFolder("tester", tmp_path)
    end(killed)
    assert left.exists()
    own = TemporaryFolder("test", tmp_path)
    assert not left.exists()
    assert (used / "socket").exists()
    assert {*tmp_path.iterdir()} == {used, own.path, other_kind.path}
    again = TemporaryFolder("test", tmp_path)  # and none of this process's own
    assert own.path.exists()
    end(living)
    for folder in (own, again, other_kind):
        folder.remove()
    TemporaryFolder("test", tmp_path).remove()
    assert not [*tmp_path.iterdir()]


def test_one_that_is_forgotten_is_left_no_longer_than_to_the_next(tmp_path: Path) -> None:
    left = TemporaryFolder("test", tmp_path).path
    assert left.exists()
    TemporaryFolder("test", tmp_path).remove()
    assert not left.exists()


@pytest.mark.parametrize("age, is_left", [(0, True), (2 * scratch.SECONDS_TO_LOCK, False)])
def test_one_without_a_lock_may_just_be_made(age: int, is_left: bool, tmp_path: Path) -> None:
    bare = tmp_path / "lamina-test-abc"
    bare.mkdir()
    os.utime(bare, (time.time() - age,) * 2)
    TemporaryFolder("test", tmp_path).remove()
    assert bare.exists() == is_left


def test_links_files_and_folders_of_other_names_stay(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / scratch.LOCK).touch()
    (tmp_path / "lamina-test-link").symlink_to(elsewhere)
    (tmp_path / "lamina-test-file").touch()
    before = {*tmp_path.iterdir()}
    TemporaryFolder("test", tmp_path).remove()
    assert {*tmp_path.iterdir()} == before
    assert (elsewhere / scratch.LOCK).exists()
