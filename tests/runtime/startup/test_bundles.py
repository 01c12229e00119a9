"""A cache that was exported here starts there: nothing compiled, the same tokens."""

import logging

import pytest

from lamina import Runtime, SamplingParams
from lamina.common.bundle import export_bundle, import_bundle, read_bundle
from lamina.common.progress import say_nothing
from lamina.common.store import Store
from lamina.custom_ops._shared.ledger import LEDGER
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.loader import missing
from lamina.runtime.startup.warm_manifest import Lacks

pytestmark = pytest.mark.timeout(600)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tokens(folder, cache, **settings):
    with Runtime.from_pretrained(folder, device="cpu", cache_dir=cache, **settings) as runtime:
        outputs = runtime.generate([[1, 2, 3], [4]], GREEDY)
        return [list(output.outputs[0].token_ids) for output in outputs], runtime.stats()["compile"]


@pytest.fixture
def forgetful(monkeypatch, forget_kernels):
    """forgetful() -> what this process has loaded is not copied to the next cache."""

    def forget():
        monkeypatch.setattr(LEDGER, "_used", {})
        forget_kernels()

    return forget


def test_an_imported_cache_starts_warm_with_the_same_tokens(
    tiny_folder, compile_cache, tmp_path, forgetful, caplog
):
    expected, _ = tokens(tiny_folder, compile_cache)
    export_bundle(Store(compile_cache), tmp_path / "bundle")
    other = Store(tmp_path / "elsewhere")
    import_bundle(other, read_bundle(tmp_path / "bundle"), None)
    forgetful()
    config = RuntimeConfig(model=tiny_folder, device="cpu", cache_dir=other.root)
    assert missing(config, say_nothing) == Lacks(missing=(), unmeasured=())
    with caplog.at_level(logging.INFO, logger="lamina"):
        found, pieces = tokens(tiny_folder, other.root, require_warm=True)
    assert found == expected
    assert (pieces["compiled"], pieces["loaded"]) == (0, 3)
    told = [record.getMessage() for record in caplog.records if "nothing compiled" in record.getMessage()]
    assert len({*told}) == 1
    assert f"from {other.root} in " in told[0]
