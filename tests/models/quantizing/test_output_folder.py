"""The folder that is written: what is refused, what is replaced, and that nothing is ever left half-made."""

import os
from pathlib import Path

import pytest

from lamina.common.errors import ConfigError, StoreError
from lamina.models.quantizing.output import check_output, new_folder


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def write(output: Path, error: type[BaseException], *, num_bytes: int = 0, overwrite: bool = False) -> None:
    """Half of a folder, before it ends with an error."""
    with new_folder(output, num_bytes, overwrite=overwrite) as folder:
        (folder / "half").write_text("half")
        raise error


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_a_place_that_would_lose_something_is_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "models" / "mine")
    (tmp_path / "link").symlink_to(model)
    for output, why in {
        model: "inside of the model",
        model / "new": "inside of the model",
        model / "deep" / "new": "inside of the model",
        tmp_path / "link" / "new": "inside of the model",
        tmp_path / "models" / ".." / "models" / "mine": "inside of the model",
        tmp_path / "models": "holds the model",
        tmp_path: "holds the model",
        model / "config.json": "inside of the model",
    }.items():
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=f"output is .*{why}"):
                check_output(output, model, overwrite=overwrite)
    assert names(tmp_path) == {"link", "models", "models/mine"} | {
        f"models/mine/{name}" for name in ("config.json", "model.safetensors")
    }


def test_a_file_and_a_folder_with_files_are_refused_by_what_they_are(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check_output(tmp_path / "file", model, overwrite=True)
    other = model_folder(tmp_path / "other")
    with pytest.raises(ConfigError, match="holds files; wanted an empty folder, or overwrite=True"):
        check_output(other, model, overwrite=False)
    check_output(other, model, overwrite=True)
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", model, overwrite=False)
    check_output(tmp_path / "none" / "at all", model, overwrite=False)


def test_only_a_folder_of_files_with_a_config_is_ever_replaced(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    work = model_folder(tmp_path / "work")
    (work / "photographs").mkdir()
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "letter.txt").write_text("")
    for folder in (work, plain):
        with pytest.raises(ConfigError, match="other things than a model's files"):
            check_output(folder, model, overwrite=True)


def test_a_folder_takes_its_name_at_the_end_with_all_that_lies_in_it(tmp_path: Path) -> None:
    for target in (tmp_path / "new", tmp_path / "some" / "where", tmp_path / "empty"):
        if target.name == "empty":
            target.mkdir()
        with new_folder(target, 0, overwrite=False) as folder:
            (folder / "a").write_text("a")
            assert not target.exists() or not any(target.iterdir())
        assert names(target) == {"a"}
        assert {path.name for path in target.parent.iterdir()} <= {"new", "some", "empty", "where"}
        mask = os.umask(0)
        os.umask(mask)
        assert target.stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.parametrize("error", [KeyboardInterrupt, StoreError, OSError, SystemExit])
def test_nothing_is_left_where_the_work_ends_early(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(StoreError if error is OSError else error):
        write(tmp_path / "new", error)
    assert names(tmp_path) == set()


def test_what_is_overwritten_goes_only_once_the_new_is_whole(tmp_path: Path) -> None:
    old = model_folder(tmp_path / "model")
    with pytest.raises(KeyboardInterrupt):
        write(old, KeyboardInterrupt, overwrite=True)
    assert names(old) == {"config.json", "model.safetensors"}
    with new_folder(old, 0, overwrite=True) as folder:
        (folder / "new").write_text("new")
        assert names(old) == {"config.json", "model.safetensors"}
    assert names(tmp_path) == {"model", "model/new"}


def test_a_folder_that_somebody_else_filled_meanwhile_is_not_touched(tmp_path: Path) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "new", 0, overwrite=False) as folder:
            (folder / "mine").write_text("")
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "theirs").write_text("")

    with pytest.raises(StoreError, match="filled meanwhile"):
        fill()
    assert names(tmp_path) == {"new", "new/theirs"}


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    dead = tmp_path / ".new.partial" / "0123456789abcdef" / "new"
    dead.mkdir(parents=True)
    (dead / "half").write_text("half")
    with new_folder(tmp_path / "new", 0, overwrite=False) as first:
        assert not dead.exists()
        (first / "a").write_text("")
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "new", KeyboardInterrupt)
        assert (first / "a").exists()
    assert names(tmp_path) == {"new", "new/a"}


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"GB free, and 1180591620717.41 GB are to be written"):
        write(tmp_path / "new", AssertionError, num_bytes=1 << 70)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("parent", ["/proc/lamina", "file"])
def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"new cannot be written: .*; write elsewhere"):
        write(tmp_path / parent / "new", AssertionError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="cannot be written: Permission denied"):
        write(tmp_path / "closed" / "new", AssertionError)
