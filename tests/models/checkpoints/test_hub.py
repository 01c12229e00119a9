"""Models from a hub: a small one on this machine, served as huggingface_hub expects it."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lamina.common.errors import LoadError, UnsupportedError
from lamina.common.store import Store
from lamina.models.checkpoints.source import resolve_source

from ...families import FAMILIES

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "lamina-test/tiny"


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder as the repository NAME, and keeps what was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.fetched: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            folder = self.server.folder
            return self._json([_entry(file, folder) for file in sorted(folder.rglob("*")) if file.is_file()])
        if path.startswith(f"/api/models/{NAME}"):
            return self._json({"id": NAME, "sha": COMMIT, "siblings": []})
        file = self.server.folder / path.rpartition("/resolve/")[2].partition("/")[2]
        if path.startswith("/api") or not file.is_file():
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if with_body:
            self.server.fetched.append(str(file.relative_to(self.server.folder)))
        headers = {"X-Repo-Commit": COMMIT, "ETag": _entry(file, self.server.folder)["oid"]}
        return self._send(200, file.read_bytes(), headers, with_body=with_body)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _entry(file: Path, folder: Path) -> dict[str, Any]:
    content = file.read_bytes()
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": str(file.relative_to(folder)), "size": len(content), "oid": oid}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkpoint in several files, and beside it one in another format that nobody should fetch."""
    folder = FAMILIES["qwen3"].save(tmp_path / "repository", max_shard_size="100KB")
    (folder / "consolidated.safetensors").write_bytes(bytes(1 << 20))
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(repository)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_model_comes_from_the_hub_with_its_own_weights_alone_and_progress(
    hub: Hub, repository: Path, store: Store
) -> None:
    said: list[tuple[str, float, str]] = []
    folder = resolve_source(NAME, store=store, progress=lambda *report: said.append(report))
    wanted = {file.name for file in repository.iterdir()} - {"consolidated.safetensors"}
    assert {file.name for file in folder.iterdir()} == wanted == set(hub.fetched)
    fractions = [fraction for stage, fraction, _ in said if stage == "download"]
    assert len(fractions) == len(said)
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert "GB" in said[-1][2]


def test_modules_behind_a_model_come_with_it_and_nothing_else_of_other_folders(
    hub: Hub, repository: Path, store: Store
) -> None:
    names = ("Transformer", "Pooling", "Dense")
    paths = ("", "1_Pooling", "2_Dense")
    kinds = [
        {"type": f"sentence_transformers.models.{n}", "path": p} for n, p in zip(names, paths, strict=True)
    ]
    (repository / "modules.json").write_text(json.dumps(kinds))
    wanted = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    for name in (*wanted, "onnx/config.json", "onnx/model.onnx"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(json.dumps(name))  # another content each, or one would do for all
    folder = resolve_source(NAME, store=store)
    found = {str(file.relative_to(folder)) for file in folder.glob("*/*")}
    assert found == wanted
    assert wanted < set(hub.fetched)


def test_offline_what_was_downloaded_serves(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch, logits_of: Callable[..., Any]
) -> None:
    folder = resolve_source(NAME, store=store)
    fetched = list(hub.fetched)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_source(NAME, store=store) == folder
    assert resolve_source(NAME, store=store, revision=COMMIT) == folder
    assert hub.fetched == fetched
    assert logits_of(folder, [1, 2, 3]).isfinite().all()


def test_offline_an_interrupted_download_is_no_model(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_source(NAME, store=store)
    next(folder.glob("*.safetensors")).unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match=f"{NAME} is not a local folder, is not in the download cache"):
        resolve_source(NAME, store=store)


@pytest.fixture
def kept(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the model in the download cache, and no connection."""
    folder = resolve_source(NAME, store=store).parent.parent
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder


def test_offline_the_one_commit_serves_where_no_branch_names_it(
    kept: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    (kept / "refs" / "main").unlink()
    assert resolve_source(NAME, store=store) == kept / "snapshots" / COMMIT
    assert any("does not say which commit is main" in message for message in caplog.messages)
    with pytest.raises(LoadError, match="is not in the download cache"):
        resolve_source(NAME, store=store, revision="other")


@pytest.mark.parametrize("end", ["\n", "\r\n", " "])
def test_offline_a_branch_whose_file_ends_in_a_break_is_read(kept: Path, store: Store, end: str) -> None:
    (kept / "refs" / "main").write_text(COMMIT + end)
    (kept / "refs" / "v1").write_text(COMMIT + end)
    (kept / "snapshots" / ("f" * 40)).mkdir()
    assert resolve_source(NAME, store=store) == kept / "snapshots" / COMMIT
    assert resolve_source(NAME, store=store, revision="v1") == kept / "snapshots" / COMMIT


@pytest.mark.parametrize("content", [None, "", "gone"])
def test_offline_several_commits_are_named_where_none_is_main(
    kept: Path, store: Store, content: str | None
) -> None:
    (kept / "refs" / "main").unlink()
    if content is not None:
        (kept / "refs" / "main").write_text(content)
    (kept / "snapshots" / ("f" * 40)).mkdir()
    with pytest.raises(LoadError, match=f"holds {NAME} at {COMMIT}, {'f' * 40}.*wanted revision="):
        resolve_source(NAME, store=store)
    assert resolve_source(NAME, store=store, revision=COMMIT) == kept / "snapshots" / COMMIT


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_come(
    hub: Hub, repository: Path, store: Store
) -> None:
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(UnsupportedError, match="'OtherForCausalLM' is not known"):
        resolve_source(NAME, store=store)
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


def test_an_adapter_is_refused_before_its_weights_come(hub: Hub, repository: Path, store: Store) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}
    (repository / "adapter_config.json").write_text(json.dumps(adapter))
    (repository / "config.json").unlink()
    with pytest.raises(UnsupportedError, match=r"adapter_config.json: LORA, its base model is owner/base"):
        resolve_source(NAME, store=store)
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


def test_a_repository_that_the_hub_has_not_is_named(hub: Hub, store: Store) -> None:
    with pytest.raises(LoadError, match="neither a folder nor the hub has lamina-test/none"):
        resolve_source("lamina-test/none", store=store)
