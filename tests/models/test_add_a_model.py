"""The page on adding a model, and the package that it points to, run."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.common.errors import ConfigError, LoadError
from lamina.models import find_model, registry
from lamina.models.config import ModelConfig
from lamina.models.families import llama
from lamina.models.layers import EXACT_OPS, FAST_OPS, Ops

from ..conftest import TINY
from ..families import WINDOW, Family, oracle, oracle_logits

ROOT = Path(__file__).parents[2]
PAGE, PACKAGE = ROOT / "docs" / "add_a_model.md", ROOT / "examples" / "olmo2"
PROMPT = [1, 17, 300, 42, 42, 5, 199, 7]
OLMO2 = Family(prefix="Olmo2")
MINISTRAL = Family(prefix="Ministral", changes={"sliding_window": WINDOW, "head_dim": 16})


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_definitions", dict(registry._definitions))


@pytest.fixture
def page() -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})


def install(folder: Path, entry_points: dict[str, str]) -> None:
    """What pip would write of a package's entry points."""
    info = folder / f"package_{len(list(folder.iterdir()))}-0.1.dist-info"
    info.mkdir()
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[lamina.models]", *lines, ""]))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {info.name[:-14]}\nVersion: 0.1\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of installed packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def olmo2_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    install(site, project["entry-points"]["lamina.models"])


def check(family: Family, folder: Path, ops: Ops, logits_of: Callable[..., Tensor]) -> None:
    expected = oracle_logits(oracle(family.save(folder), family.architecture), PROMPT)
    torch.testing.assert_close(logits_of(folder, PROMPT, ops=ops), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ops", [FAST_OPS, EXACT_OPS], ids=["fast", "exact"])
def test_the_model_of_the_package_is_found_and_computes_what_transformers_does(
    olmo2_package: None, ops: Ops, tmp_path: Path, logits_of: Callable[..., Tensor]
) -> None:
    check(OLMO2, tmp_path / "model", ops, logits_of)


def test_the_model_of_the_page_computes_what_transformers_does(
    page: None, tmp_path: Path, logits_of: Callable[..., Tensor]
) -> None:
    check(MINISTRAL, tmp_path, FAST_OPS, logits_of)


def test_a_model_keeps_fields_of_its_own_in_its_config() -> None:
    (block,) = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "own" in code
    ]
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, str(PAGE), "exec"), page)
    registry.register_model("ClippedForCausalLM", replace(llama.LLAMA, config=page["config"]))
    raw = TINY | {"architectures": ["ClippedForCausalLM"], "clip_qkv": 8.0}
    assert ModelConfig.from_dict(raw).own == page["Clipped"](limit=8.0)
    assert ModelConfig.from_dict(raw) != ModelConfig.from_dict(raw | {"clip_qkv": 9.0})
    with pytest.raises(ConfigError, match="clip_qkv is -1"):
        ModelConfig.from_dict(raw | {"clip_qkv": -1})
    registry.register_model("OpenForCausalLM", replace(llama.LLAMA, config=lambda fields: {"own": {}}))
    with pytest.raises(ConfigError, match=r"own is {}; wanted a frozen dataclass"):
        ModelConfig.from_dict(raw | {"architectures": ["OpenForCausalLM"]})


def test_a_package_whose_module_is_missing_is_named(site: Path) -> None:
    install(site, {"OutsideForCausalLM": "no_such_module:MODEL"})
    with pytest.raises(LoadError, match=r"'OutsideForCausalLM' is offered by no_such_module:MODEL"):
        find_model("OutsideForCausalLM")


def test_what_is_no_definition_is_refused(site: Path) -> None:
    install(site, {"OutsideForCausalLM": "json:dumps"})
    with pytest.raises(ConfigError, match="json:dumps is function; wanted a ModelDefinition"):
        find_model("OutsideForCausalLM")


def test_two_packages_for_one_architecture_are_refused(site: Path) -> None:
    for value in ("one:MODEL", "two:MODEL"):
        install(site, {"OutsideForCausalLM": value})
    with pytest.raises(ConfigError, match=r"several packages offer .*: one:MODEL, two:MODEL"):
        find_model("OutsideForCausalLM")


def test_an_unknown_architecture_is_told_what_packages_offer(olmo2_package: None) -> None:
    with pytest.raises(Exception, match=r"known are.*LlamaForCausalLM.*Olmo2ForCausalLM"):
        find_model("OtherForCausalLM")


def test_a_package_does_not_replace_a_model_of_ours(site: Path) -> None:
    install(site, {"LlamaForCausalLM": "no_such_module:MODEL"})
    assert find_model("LlamaForCausalLM").forward.__module__ == "lamina.models.families.llama"
