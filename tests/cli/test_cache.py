"""`lamina cache` and `lamina warmup` from outside: what they print, and with which exit code they end."""

import json

import pytest
import typer.testing

from lamina.cli import app
from lamina.common.errors import StoreError
from lamina.common.store import Store

KEY = "c" * 64


@pytest.fixture
def store(tmp_path):
    """A store with one kernel."""
    store = Store(tmp_path / "store")
    store.write_ref("kernels", KEY, {"object": store.put(b"\x7fELF"), "op": "norm", "compiler": "g++ 12"})
    return store


def run(store, *arguments, code=0):
    """What a command prints."""
    result = typer.testing.CliRunner().invoke(app, ["cache", *arguments, "--cache-dir", str(store.root)])
    if isinstance(result.exception, StoreError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_what_the_cache_holds_is_listed_and_shown(store):
    assert run(store, "list").split()[:2] == ["kernels", KEY[:16]]
    (row,) = json.loads(run(store, "list", "--json"))
    assert row["what"] == "norm, g++ 12"
    shown = json.loads(run(store, "show", KEY[:4], "--json"))
    assert shown["record"]["op"] == "norm"
    assert len(shown["files"]) == 2
    with pytest.raises(StoreError, match="0 keys of the cache begin with 'f'; wanted one"):
        run(store, "show", "f")


def test_damage_ends_with_1_and_is_named(store):
    assert run(store, "verify") == "nothing to report\n"
    (path,) = (store.root / "objects").rglob("?" * 62)
    path.write_bytes(b"other")
    assert str(path) in run(store, "verify", code=1)
    assert json.loads(run(store, "verify", "--json", code=1))["found"]


def test_what_is_too_large_goes(store):
    assert "0 entries" in run(store, "gc", "--max-size", "1M")
    assert json.loads(run(store, "gc", "--max-size", "10", "--json"))["removed"] == [f"kernels/{KEY}"]
    assert "wanted a size such as 500M or 20G" in run(store, "gc", "--max-size", "much", code=2)


def test_a_bundle_is_imported_only_when_it_is_trusted(store, tmp_path):
    bundle, other = str(tmp_path / "bundle"), Store(tmp_path / "other")
    assert "2 files" in run(store, "export", bundle)
    with pytest.raises(StoreError, match=r"is code: give --key.*or --trust"):
        run(other, "import", bundle)
    assert list(other.refs("kernels")) == []
    assert run(other, "import", bundle, "--trust").startswith("2 of 2 files were new")
    assert set(other.refs("kernels")) == {KEY}
    assert "which nobody signed" in run(other, "audit", code=1)


def test_a_bundle_of_another_signer_is_refused(store, tmp_path):
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    def write_keys(name):
        key = Ed25519PrivateKey.generate()
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pem").write_bytes(private)
        (tmp_path / f"{name}.pub").write_bytes(public)

    write_keys("ours")
    write_keys("theirs")
    bundle, other = str(tmp_path / "bundle"), Store(tmp_path / "other")
    run(store, "export", bundle, "--sign", str(tmp_path / "ours.pem"))
    with pytest.raises(StoreError, match="is not signed with the key"):
        run(other, "import", bundle, "--key", str(tmp_path / "theirs.pub"))
    run(other, "import", bundle, "--key", str(tmp_path / "ours.pub"))
    assert set(other.refs("kernels")) == {KEY}
    assert run(other, "audit") == "nothing to report\n"


@pytest.mark.long
@pytest.mark.usefixtures("build_once")
def test_what_a_model_is_compiled_to_is_explained_without_its_weights(tiny_folder, compile_cache):
    arguments = ["explain", str(tiny_folder), "--device", "cpu", "--cache-dir", str(compile_cache)]
    text = typer.testing.CliRunner().invoke(app, arguments)
    assert text.exit_code == 0, text.output
    assert "pass add_rms_norm" in text.output
    facts = json.loads(typer.testing.CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert len(facts["pieces"]) == 3
    assert facts["guards"]
