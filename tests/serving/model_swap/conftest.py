"""Real servers of several TINY models with different weights, which tell each other apart."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lamina.serving.config import ServeConfig
from lamina.serving.server import Server

from ..conftest import SETTINGS, RunningServer

NAMES = ("a", "b", "c")


class SeveralModels(RunningServer):
    """A server of several models, by their names."""

    def __init__(self, folders: dict[str, Path], config: dict[str, Any], settings: dict[str, Any]) -> None:
        self.folders = folders
        super().__init__(next(iter(folders.values())), config, settings)

    def _made(self, config: dict[str, Any]) -> Server:
        own = config.pop("own", {})  # of single models, by their names
        made = [
            (
                ServeConfig(**{"model_names": (name,), "port": 0, **config, **own.get(name, {})}),
                partial(self._open_one, folder),
            )
            for name, folder in self.folders.items()
        ]
        return Server(*made[0], made[1:])

    async def _open_one(self, folder: Path) -> Any:
        from lamina.runtime.async_runtime import AsyncRuntime

        return await AsyncRuntime.from_pretrained(folder, engine="thread", **self.settings)

    @property
    def models(self) -> Any:
        """Its models; used in the server's loop alone."""
        return self.server.models

    def answer(self, model: str | None, prompt: Any = "hello", **fields: Any) -> Any:
        """The answer to a completion, of which the texts are compared."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        return self.client.post("/v1/completions", json=body | ({} if model is None else {"model": model}))

    def text(self, model: str | None, prompt: Any = "hello", **fields: Any) -> str:
        """The text of such an answer, which must be one."""
        answer = self.answer(model, prompt, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="session")
def folders(
    make_tiny_folder: Callable[..., Path], tiny_text_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Three TINY models with one tokenizer and different weights."""
    found = {"a": tiny_text_folder}
    for seed, name in enumerate(NAMES[1:], start=1):
        found[name] = tmp_path_factory.mktemp("several") / name
        shutil.copytree(tiny_text_folder, found[name])
        shutil.copy(make_tiny_folder(seed=seed) / "model.safetensors", found[name] / "model.safetensors")
    return found


@pytest.fixture(scope="session")
def start_several(folders: dict[str, Path]) -> Iterator[Callable[..., SeveralModels]]:
    """start_several("ab" or {name: folder}, settings={}, own={name: config}, **config), closed last."""
    started: list[SeveralModels] = []

    def start(names: Any = "ab", *, settings: dict[str, Any] | None = None, **config: Any) -> SeveralModels:
        chosen = names if isinstance(names, dict) else {name: folders[name] for name in names}
        started.append(SeveralModels(chosen, {"min_residence": 0.0, **config}, settings or {}))
        return started[-1]

    yield start
    for server in started:
        if server.thread.is_alive():
            server.close()


@pytest.fixture(scope="session")
def alone(folders: dict[str, Path]) -> Callable[..., str]:
    """alone(name, prompt="hello") -> the text that a model answers by itself, as SeveralModels.text()."""
    from lamina import Runtime, SamplingParams

    found: dict[tuple[str, str, int], str] = {}

    def answered(name: str, prompt: str = "hello", max_tokens: int = 8) -> str:
        if (name, prompt, max_tokens) not in found:
            with Runtime.from_pretrained(folders[name], **SETTINGS) as runtime:
                params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
                found[name, prompt, max_tokens] = runtime.generate([prompt], params)[0].outputs[0].text
        return found[name, prompt, max_tokens]

    return answered


@pytest.fixture(scope="module")
def several(start_several: Callable[..., SeveralModels]) -> Iterator[SeveralModels]:
    """A server of three models, one awake at a time, that tests of a module share."""
    server = start_several("abc", own={"b": {"model_names": ("b", "alias-of-b")}})
    yield server
    server.close()
