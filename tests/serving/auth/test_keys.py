"""The file of keys and the environment: what is read, what is refused, and that no secret is repeated."""

import contextlib
import hashlib
import hmac
import logging
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ConfigError
from lamina.serving.auth.key_file import read_key_file
from lamina.serving.auth.keys import Keys, is_loopback
from lamina.serving.config import ServeConfig
from lamina.serving.errors import ApiError

SECRET = "sk-hunter2-very-secret"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch):
    monkeypatch.delenv("LAMINA_API_KEY", raising=False)


@pytest.fixture
def key_file(tmp_path):
    """key_file(text) -> the path of a file that its owner alone may read."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "keys.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(0o600)
        return path

    return write


def config(**settings) -> ServeConfig:
    return ServeConfig(model_names=("tiny",), **settings)


def test_keys_are_read_with_their_limits_plain_or_as_digest(key_file):
    path = key_file(
        f"""
        [keys.alice]
        key = "sha256:{DIGEST}"
        requests_per_minute = 60
        tokens_per_minute = 100_000
        max_concurrent = 8
        priority = -1
        routes = ["/v1/chat/*", "/v1/models"]
        models = ["tiny"]

        [keys.bob]
        key = "another"
        """
    )
    keys = Keys.load(config(api_key_file=path, host="0.0.0.0"))
    alice, bob = keys.find([SECRET.encode()]), keys.find([b"another"])
    assert (alice.name, bob.name, keys.names) == ("alice", "bob", ("alice", "bob"))
    assert alice.entry.limits.requests_per_minute == 60
    assert alice.entry.limits.tokens_per_minute == 100_000
    assert alice.entry.limits.max_concurrent == 8
    assert alice.entry.priority == -1
    assert alice.allows_model("tiny")
    assert not alice.allows_model("large")
    assert bob.allows_model("large")
    alice.require_route("/v1/models")
    alice.require_route("/v1/chat/completions")
    for path in ("/v1/models/tiny", "/v1/completions", "/v1/chat", "/V1/models", "//v1/models", ""):
        with pytest.raises(ApiError) as caught:
            alice.require_route(path)
        assert caught.value.status == 403
    assert SECRET not in repr((keys, alice, bob))
    assert DIGEST not in repr((keys, alice, bob))


def test_the_environment_holds_several_keys(monkeypatch):
    monkeypatch.setenv("LAMINA_API_KEY", f" one, sha256:{DIGEST} ,, ")
    keys = Keys.load(config())
    assert keys.find([b"one"]).name == "env-1"
    assert keys.find([SECRET.encode()]).name == "env-2"
    assert keys.find([b"two", b"one"]).name == "env-1"
    for wrong in (b"", b"One", b"one ", DIGEST.encode(), f"sha256:{DIGEST}".encode(), b"\xff"):
        assert keys.find([wrong]) is None
    assert keys.find([]) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "at least one"),
        ("[keys]", "at least one"),
        (f'key = "{SECRET}"', r"\[keys.NAME\]"),
        (f'[keys.a]\nkey = "{SECRET}"\n[other]', "nothing else"),
        (f'[keys]\na = "{SECRET}"', "is no table"),
        ("[keys.a]", "has no key"),
        ("[keys.a]\nkey = 5", "has no key"),
        ('[keys.a]\nkey = ""', "printable ASCII"),
        (f'[keys.a]\nkey = " {SECRET}"', "printable ASCII"),
        (f'[keys.a]\nkey = "{SECRET}é"', "printable ASCII"),
        (f'[keys.a]\nkey = "{SECRET}\\n"', "printable ASCII"),
        (f'[keys.a]\nkey = "sha256:{SECRET}"', "64 hexadecimal"),
        (f'[keys.a]\nkey = "{SECRET}"\n[keys.b]\nkey = "sha256:{DIGEST}"', "one secret"),
        (f'[keys.a]\nkey = "{SECRET}"\n[keys.a]\nkey = "b"', "is no TOML"),
        (f'[keys.a]\nkey = "{SECRET}', "is no TOML: end of document"),
        (f'[keys.a]\nkey = {SECRET}"', "is no TOML"),
        (f'[keys."a b"]\nkey = "{SECRET}"', "letters, digits"),
        (f'[keys.a]\nkey = "{SECRET}"\nrequest_per_minute = 5', "requests_per_minute"),
        (f'[keys.a]\nkey = "{SECRET}"\nrequests_per_minute = 0', "at least 1"),
        (f'[keys.a]\nkey = "{SECRET}"\ntokens_per_minute = true', "at least 1"),
        (f'[keys.a]\nkey = "{SECRET}"\nmax_concurrent = 1.5', "at least 1"),
        (f'[keys.a]\nkey = "{SECRET}"\npriority = "high"', "whole number"),
        (f'[keys.a]\nkey = "{SECRET}"\nroutes = "/v1/models"', "wanted a list"),
        (f'[keys.a]\nkey = "{SECRET}"\nroutes = ["v1/models"]', "wanted a list"),
        (f'[keys.a]\nkey = "{SECRET}"\nroutes = ["/v1/*/completions"]', "wanted a list"),
        (f'[keys.a]\nkey = "{SECRET}"\nmodels = [5]', "wanted a list"),
        (b"\xff\xfe", "UTF-8"),
        ("a = " + "[" * 100_000, "is no TOML"),
        ("#" * (1 << 20) + "\n", "over 1048576 bytes"),
    ],
)
def test_a_bad_file_is_refused_and_no_secret_repeated(key_file, text, wanted):
    path = key_file(text)
    with pytest.raises(ConfigError, match=wanted) as caught:
        Keys.load(config(api_key_file=path))
    written = "".join(traceback.format_exception(caught.value))
    assert SECRET not in written
    assert DIGEST not in written


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_key_file(path)


@given(st.text())
def test_whatever_the_file_holds_it_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    with contextlib.suppress(ConfigError):
        assert read_key_file(path)


def test_a_file_that_everybody_may_read_is_warned_of(key_file, caplog):
    path = key_file(f'[keys.a]\nkey = "{SECRET}"')
    with caplog.at_level(logging.WARNING, "lamina"):
        read_key_file(path)
    assert not caplog.records
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING, "lamina"):
        read_key_file(path)
    assert "chmod 600" in caplog.text
    assert SECRET not in caplog.text


def test_without_a_key_only_this_machine_may_ask():
    assert Keys.load(config()).are_open
    assert Keys.load(config(host="0.0.0.0", no_auth=True)).are_open
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="no API key is configured"):
            Keys.load(config(host=host))


def test_keys_and_leave_to_do_without_contradict_each_other(key_file):
    path = key_file(f'[keys.a]\nkey = "{SECRET}"')
    with pytest.raises(ConfigError, match="one of them"):
        Keys.load(config(api_key_file=path, no_auth=True))


def test_loopback_is_told_from_other_addresses():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(
        map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "127.0.0.1.nip.io"))
    )


def test_a_changed_file_takes_effect_and_a_bad_one_leaves_the_keys(key_file, caplog):
    path = key_file('[keys.a]\nkey = "first"\nrequests_per_minute = 1')
    keys = Keys.load(config(api_key_file=path))
    keys.find([b"first"]).meter.count_request()

    key_file('[keys.a]\nkey = "second"\nrequests_per_minute = 1\n[keys.b]\nkey = "third"')
    assert keys.reload()
    assert keys.find([b"first"]) is None
    assert keys.find([b"third"]).name == "b"
    with pytest.raises(ApiError):  # another secret is no second allowance
        keys.find([b"second"]).meter.count_request()

    for bad in ("[keys", "", f'[keys.a]\nkey = "{SECRET}'):
        key_file(bad)
        with caplog.at_level(logging.ERROR, "lamina"):
            assert not keys.reload()
        assert "the keys stay as they are" in caplog.text
        assert SECRET not in caplog.text
        assert keys.find([b"second"]).name == "a"
    path.unlink()
    assert not keys.reload()
    assert keys.find([b"second"]).name == "a"


def test_every_key_is_compared_whichever_it_is(monkeypatch):
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or compare(a, b))
    monkeypatch.setenv("LAMINA_API_KEY", "one,two,three")
    keys = Keys.load(config())
    for secret in (b"one", b"three", b"none"):
        compared.clear()
        keys.find([secret])
        assert len(compared) == 3
