"""A server's life as a process: how it starts, drains, is told to end, and loses its engine."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from lamina.common.errors import ConfigError
from lamina.serving.config import ServeConfig
from lamina.serving.listening import listen, tls_context

from .conftest import RunningServer
from .server_process import ENVIRONMENT, LONG, SMALL, ServerProcess, assert_serves_again


@pytest.fixture(params=["thread", "process"])
def engine(request: pytest.FixtureRequest) -> str:
    """Where the engine runs."""
    kind: str = request.param
    return kind


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = Path(f"/proc/{pid}/task")
    return [int(child) for task in found.iterdir() for child in (task / "children").read_text().split()]


def test_it_drains_when_told_to_end(tiny_text_folder: Path, engine: str) -> None:
    with ServerProcess(tiny_text_folder, *SMALL, *LONG, "--engine", engine) as server:
        client = server.wait_ready()
        assert client.get("/health/ready").status_code == 200
        streams = [server.stream(1500) for _ in range(20)]
        server.wait_streaming(20)
        server.signal(signal.SIGTERM)
        server.wait_for(server.errors, "draining")
        refused = client.post("/v1/completions", json={"prompt": "hello"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert client.get("/health/live").status_code == 200
        assert client.get("/health").json()["status"] == "draining"
        ended = [stream.result(120) for stream in streams]
        assert all(stream.is_whole and stream.finish_reason == "length" for stream in ended)
        assert server.code() == 0
        assert len([line for line in server.out if line.strip()]) == 1


def test_what_runs_when_the_time_to_drain_is_over_ends_with_an_error(tiny_text_folder: Path) -> None:
    options = (*SMALL, *LONG, "--engine", "thread", "--drain-timeout", "0.2")
    with ServerProcess(tiny_text_folder, *options) as server:
        server.wait_ready()
        streams = [server.stream(20_000) for _ in range(4)]
        whole = server.stream(20_000, stream=False)
        server.wait_streaming(5)
        server.signal(signal.SIGINT)
        for stream in streams:
            ended = stream.result(60)
            assert ended.is_whole
            assert ended.events[-1]["error"]["code"] == "draining"
            assert ended.finish_reason is None
        assert whole.result(60).status == 503
        assert server.code() == 0


def test_a_second_signal_ends_it_at_once(tiny_text_folder: Path) -> None:
    with ServerProcess(tiny_text_folder, *SMALL, *LONG) as server:
        server.wait_ready()
        children = children_of(server.process.pid)
        stream = server.stream(20_000)
        server.wait_streaming(1)
        server.signal(signal.SIGTERM)
        server.wait_for(server.errors, "draining")
        server.signal(signal.SIGINT)
        assert server.code() == 128 + signal.SIGINT
        assert not stream.result(60).is_whole
        for child in children:
            assert_gone(child)


@pytest.fixture
def stuck_folder(tiny_text_folder: Path, tmp_path: Path) -> Path:
    """A model that is being loaded for ever: its config is a pipe into which nobody writes."""
    folder = tmp_path / "stuck"
    shutil.copytree(tiny_text_folder, folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    return folder


def test_it_listens_before_it_has_a_model_and_a_signal_ends_it_then(stuck_folder: Path, engine: str) -> None:
    with ServerProcess(stuck_folder, *SMALL, "--engine", engine) as server:
        assert server.client.get("/health/live").status_code == 200
        loading = server.client.get("/v1/models")
        assert loading.status_code == 503
        assert loading.json()["error"]["code"] == "starting"
        assert int(loading.headers["retry-after"]) > 0
        assert server.client.get("/health/ready").json()["status"] == "starting"
        children = children_of(server.process.pid)
        server.signal(signal.SIGTERM)
        assert server.code() == 0
        assert not server.out
        for child in children:
            assert_gone(child)


def test_when_its_engine_is_killed_every_client_is_told_and_it_ends(tiny_text_folder: Path) -> None:
    with ServerProcess(tiny_text_folder, *SMALL, *LONG) as server:
        client = server.wait_ready()
        (child,) = children_of(server.process.pid)
        streams = [server.stream(20_000) for _ in range(40)]  # more than are computed at once
        whole = server.stream(20_000, stream=False)
        server.wait_streaming(32)
        os.kill(child, signal.SIGKILL)
        ended = [stream.result(60) for stream in streams]
        assert all(end.is_whole or end.status == 503 for end in ended), ended
        assert any(end.is_whole for end in ended)
        assert all(end.events[-1]["error"]["message"] for end in ended if end.is_whole)
        assert whole.result(60).status == 503
        assert server.code() == 1
        with pytest.raises(httpx.ConnectError):
            client.get("/health/live")


@pytest.mark.long
def test_an_engine_that_is_lost_is_loaded_again_as_often_as_it_may_be(tiny_text_folder: Path) -> None:
    with ServerProcess(tiny_text_folder, *SMALL, *LONG, "--max-restarts", "1") as server:
        client = server.wait_ready()
        (child,) = children_of(server.process.pid)
        stream = server.stream(20_000)
        server.wait_streaming(1)
        os.kill(child, signal.SIGKILL)
        ended = stream.result(60)
        assert ended.events[-1]["error"]["message"]
        assert_serves_again(server)
        assert "generation_tokens_total" in client.get("/metrics").text
        (child,) = children_of(server.process.pid)
        os.kill(child, signal.SIGKILL)
        assert server.code() == 1
    assert sum("is loaded again" in line for line in server.errors) == 1


def test_a_server_that_is_to_outlive_its_engine_says_why_it_is_not_ready(tiny_text_folder: Path) -> None:
    with ServerProcess(tiny_text_folder, *SMALL, "--no-exit-on-engine-loss") as server:
        client = server.wait_ready()
        (child,) = children_of(server.process.pid)
        os.kill(child, signal.SIGKILL)
        report = first_refusal(client)
        assert report.json()["status"] == "failed"
        wanted = r"the engine is lost: its process \d+ was ended by SIGKILL.*"
        assert re.fullmatch(wanted, report.json()["reason"])
        assert client.get("/health/live").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert client.get("/metrics").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.code() == 1


def test_an_engine_that_stands_still_is_said_to_and_to_go_on_again(tiny_text_folder: Path) -> None:
    with ServerProcess(tiny_text_folder, *SMALL, *LONG) as server:
        client = server.wait_ready()
        (child,) = children_of(server.process.pid)
        stream = server.stream(300)
        os.kill(child, signal.SIGSTOP)
        report = first_refusal(client)
        assert report.json()["status"] == "stalled"
        assert report.json()["reason"]
        assert client.get("/health/live").status_code == 200
        os.kill(child, signal.SIGCONT)
        assert stream.result(60).finish_reason == "length"
        for _ in range(1200):
            if client.get("/health").status_code == 200:
                break
            time.sleep(0.05)
        assert client.get("/health").json()["status"] == "ready"
        server.signal(signal.SIGTERM)
        assert server.code() == 0


def first_refusal(client: httpx.Client) -> httpx.Response:
    """What /health/ready answers once it is no more 200."""
    for _ in range(2400):
        report = client.get("/health/ready")
        if report.status_code != 200:
            assert report.status_code == 503
            assert report.headers["retry-after"]
            return report
        time.sleep(0.05)
    raise AssertionError("it says that it is ready")


def assert_gone(pid: int) -> None:
    """Wait for a process to end; a zombie whose parent has gone counts as ended."""
    for _ in range(1200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} lives on")


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refused_start(*options: str) -> str:
    """The one message of a server that cannot start, which ends with 2."""
    command = [sys.executable, "-m", "lamina", "serve", *options]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, cwd="/", text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    said = [line for line in ended.stderr.splitlines() if "the model is loading" not in line]
    (message,) = [line for line in said if line.startswith("lamina: ")]
    return message


def test_a_port_in_use_is_one_message(taken_port: int) -> None:
    message = refused_start("nothing", "--port", str(taken_port))
    assert f"port {taken_port}" in message
    assert "in use" in message


def test_others_are_not_let_in_without_keys_unless_that_is_said() -> None:
    assert "API key" in refused_start("nothing", "--host", "0.0.0.0", "--port", "0")


def test_files_that_hold_no_certificate_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    message = refused_start("nothing", "--port", "0", "--tls-cert", str(tmp_path / "cert.pem"))
    assert "--tls-cert" in message
    assert "PEM" in message
    with pytest.raises(ConfigError, match=r"missing\.pem: No such file"):
        tls_context(ServeConfig(model_names=("tiny",), tls_cert=tmp_path / "missing.pem"))


def test_any_origin_with_credentials_is_one_message() -> None:
    message = refused_start("nothing", "--cors-origins", "*", "--cors-credentials")
    assert "--cors-origins" in message


def test_a_folder_without_a_model_is_one_message(tmp_path: Path) -> None:
    message = refused_start(str(tmp_path), "--port", "0", "--engine", "process")
    assert "config.json" in message or str(tmp_path) in message


def test_a_setting_that_the_runtime_cannot_have_is_one_message() -> None:
    message = refused_start("nothing", "--port", "0", "--engine", "thread", "--max-num-seqs", "0")
    assert "--max-num-seqs" in message


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv = ['lamina', 'serve', 'nothing'];"
        "from lamina.cli import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    assert "uvicorn" in ended.stderr
    assert "pip install 'lamina[serve]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_it_serves_at_a_unix_socket_that_is_gone_afterwards(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    path = tmp_path / "lamina.sock"
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(path))
    server = start_server(uds=path)
    assert server.client.get("/health").status_code == 200
    assert server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    with pytest.raises(ConfigError, match="in use; wanted a free path"):
        listen(ServeConfig(model_names=("tiny",), uds=path))
    assert server.client.get("/health").status_code == 200
    assert server.close() == 0
    assert not path.exists()


def test_a_file_in_the_way_of_a_unix_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("keep me")
    with pytest.raises(ConfigError, match="precious"):
        listen(ServeConfig(model_names=("tiny",), uds=path))
    assert path.read_text() == "keep me"


def test_it_speaks_tls(start_server: Callable[..., RunningServer], certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    server = start_server(tls_cert=cert, tls_key=key)
    assert server.url.startswith("https://")
    assert server.client.get("/health").status_code == 200
    body = {"prompt": "a", "max_tokens": 5, "stream": True}
    assert server.client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    with httpx.Client() as plain, pytest.raises(httpx.HTTPError):
        plain.get(server.url.replace("https", "http") + "/health")
    assert server.client.get("/health").status_code == 200


def test_a_key_that_is_encrypted_or_of_another_certificate_is_one_message(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    cert, _ = certificate
    other = ec.generate_private_key(ec.SECP256R1())
    for encryption in (serialization.NoEncryption(), serialization.BestAvailableEncryption(b"secret")):
        path = tmp_path / "other.pem"
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        path.write_bytes(other.private_bytes(*form))
        with pytest.raises(ConfigError, match=r"other\.pem"):
            tls_context(ServeConfig(model_names=("tiny",), tls_cert=cert, tls_key=path))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1 and of its key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, address = ec.generate_private_key(ec.SECP256R1()), ipaddress.ip_address("127.0.0.1")
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(address)]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(*form))
    return folder / "cert.pem", folder / "key.pem"
