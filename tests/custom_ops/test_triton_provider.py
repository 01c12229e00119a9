"""Providers in Triton: found by name, imported only when chosen, missed with a remedy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lamina.common import env
from lamina.common.errors import KernelBuildError
from lamina.common.store import Store
from lamina.custom_ops._shared import triton_cache
from lamina.custom_ops._shared.ledger import Ledger, watched
from lamina.custom_ops._shared.triton_provider import triton_provider

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_missing_triton_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lamina.custom_ops.rms_norm._triton", raising=False)
    with pytest.raises(KernelBuildError, match="pip install triton"):
        triton_provider("rms_norm").load()


def test_a_missing_kernel_is_no_missing_triton() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_op"):
        triton_provider("no_such_op").load()


def test_importing_the_ops_does_not_import_their_triton_kernels() -> None:
    code = "import sys, lamina.custom_ops; assert not any(name.endswith('._triton') for name in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.fixture
def triton_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store in which nothing has set yet where Triton is to keep its kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    return Store(tmp_path / "store")


def test_triton_keeps_its_kernels_in_the_store_and_finds_them_where_it_has_moved(
    triton_store: Store, tmp_path: Path
) -> None:
    triton_cache.keep_triton_kernels(triton_store)
    folder = Path(env.os.environ["TRITON_CACHE_DIR"])
    assert folder == triton_store.root / "outside" / "triton"
    (folder / "KEY").mkdir()
    group = folder / "KEY" / "__grp__k.json"
    group.write_text(json.dumps({"child_paths": {"k.cubin": str(folder / "KEY" / "k.cubin")}}))
    (folder / "KEY" / "__grp__damaged.json").write_text("[")
    moved = Store(shutil.move(triton_store.root, tmp_path / "moved"))
    triton_cache.keep_triton_kernels(moved)
    paths = json.loads((moved.root / "outside/triton/KEY/__grp__k.json").read_text())["child_paths"]
    assert paths == {"k.cubin": str(moved.root / "outside/triton/KEY/k.cubin")}


def test_kernels_of_ours_are_noted_and_reported_when_they_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, watched_names = Ledger(), list[str]()
    monkeypatch.setattr(triton_cache, "LEDGER", ledger)
    files = {"norm.cubin": "/some/where/KEY/norm.cubin"}
    ours = SimpleNamespace(
        fn=SimpleNamespace(__module__="lamina.custom_ops.rms_norm._triton", __name__="norm")
    )
    generated = SimpleNamespace(fn=SimpleNamespace(__module__="torch_inductor", __name__="fused"))
    with watched(watched_names.append):
        for source in (ours, generated):
            for cache_hit in (True, False):
                triton_cache._on_kernel(src=source, metadata_group=files, cache_hit=cache_hit, times=None)
    assert watched_names == ["the Triton kernel norm"]
    assert [(used.kind, used.key, used.op) for used in ledger.used] == [("triton", "KEY", "norm")]
