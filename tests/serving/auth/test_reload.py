"""`lamina serve` with keys as its operator sees it: what it refuses to start with, and SIGHUP."""

import signal

import pytest

from ..server_process import SMALL, ServerProcess


def test_keys_are_read_again_on_sighup_and_a_bad_file_leaves_them(tiny_text_folder, tmp_path):
    path = tmp_path / "keys.toml"

    def write(content: str) -> None:
        path.write_text(content)
        path.chmod(0o600)

    def knows(key: str) -> bool:
        return server.client.get("/v1/models", headers={"x-api-key": key}).status_code != 401

    write('[keys.a]\nkey = "first-secret"\n')
    with ServerProcess(tiny_text_folder, *SMALL, "--api-key-file", str(path)) as server:
        assert knows("first-secret")
        assert not knows("second-secret")
        write('[keys.a]\nkey = "second-secret"\n')
        server.signal(signal.SIGHUP)
        server.wait_for(server.errors, "read the keys again, 1 in all")
        assert not knows("first-secret")
        assert knows("second-secret")
        write('[keys.a]\nkey = "third-secret"\nrequests = 5\n')
        server.signal(signal.SIGHUP)
        server.wait_for(server.errors, "the keys stay as they are: .*requests")
        assert knows("second-secret")
        assert not knows("third-secret")
        server.signal(signal.SIGTERM)
        assert server.code() == 0
    assert "secret" not in "".join(server.errors + server.out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "no API key is configured; give --api-key-file or LAMINA_API_KEY"),
        (("--api-key-file", "/nowhere/keys.toml"), "cannot be read: No such file"),
    ],
)
def test_it_does_not_start_where_everybody_could_ask_or_its_keys_are_missing(
    tiny_text_folder, options, message
):
    with ServerProcess(tiny_text_folder, *SMALL, *options, environment={"LAMINA_API_KEY": ""}) as server:
        assert server.code() == 2
    assert message in "".join(server.errors)
