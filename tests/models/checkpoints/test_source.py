"""What counts as a model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.common.errors import LoadError, UnsupportedError
from lamina.common.store import Store
from lamina.models.checkpoints.source import resolve_source


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_model_folder_is_taken_as_it_is(tiny_folder: Path, store: Store) -> None:
    assert resolve_source(str(tiny_folder), store=store) == tiny_folder
    assert resolve_source(tiny_folder, store=store) == tiny_folder


def test_a_folder_without_config_says_what_is_missing(tmp_path: Path, store: Store) -> None:
    with pytest.raises(LoadError, match=r"no model folder: it has no config\.json"):
        resolve_source(tmp_path, store=store)


def test_a_folder_without_weights_says_what_is_missing(tmp_path: Path, store: Store) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        resolve_source(tmp_path, store=store)


def test_a_folder_around_a_gguf_file_points_to_the_file(tmp_path: Path, store: Store) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(LoadError, match=r"pass the GGUF file itself \(a\.gguf\)"):
        resolve_source(tmp_path, store=store)


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./nothing", "gone.gguf", "two words", "a/b/c", "", "~/none"]
)
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name: str, store: Store) -> None:
    with pytest.raises(LoadError, match=r"does not exist; wanted a model folder, a \.gguf file or a hub id"):
        resolve_source(name, store=store)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, store: Store) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(LoadError, match=r"is a file; wanted a model folder, a \.gguf file or a hub id"):
        resolve_source(tmp_path / "model.bin", store=store)


def test_offline_a_hub_id_that_was_never_downloaded_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match=r"lamina-test/none is not a local folder.*cannot be reached"):
        resolve_source("lamina-test/none", store=store)


@pytest.mark.parametrize("beside_a_model", [True, False])
def test_an_adapter_is_refused_by_name(
    beside_a_model: bool, tiny_folder: Path, changed: Callable[..., Path], tmp_path: Path, store: Store
) -> None:
    folder = changed(tiny_folder) if beside_a_model else tmp_path
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "o/base"}')
    with pytest.raises(UnsupportedError, match=r"LORA, its base model is o/base\), which Lamina does"):
        resolve_source(folder, store=store)
