"""Where a server listens: its socket, its certificate, and how many files it may have open."""

import contextlib
import os
import resource
import socket
import ssl
import stat

from ..common.errors import ConfigError
from .config import ServeConfig

BACKLOG = 4096  # connections that the system holds until they are taken
SPARE_FILES = 256  # that a process opens beside its connections


def listen(config: ServeConfig) -> socket.socket:
    """Returns a listening socket; ConfigError, saying why, where there can be none."""
    if config.uds is not None:
        return _listen_at_path(os.fspath(config.uds))
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {config.host}, port {config.port}: {error.strerror or error}; "
            "wanted an address of this machine and a free port (--port 0 takes one)"
        ) from error
    listener.setblocking(False)
    return listener


def _listen_at_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_abandoned(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at uds {path}: {error.strerror or error}; wanted a free path"
        ) from error
    listener.setblocking(False)
    return listener


def _remove_abandoned(path: str) -> None:
    """Remove a socket at which nobody listens any more; anything else stays, and is in the way."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)


def stop_listening(listener: socket.socket, config: ServeConfig) -> None:
    """Close a listener, and remove its file."""
    listener.close()
    if config.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(config.uds)


def address_of(config: ServeConfig, listener: socket.socket) -> str:
    """Returns the address as clients write it: http://host:port/root, or unix:path."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.tls_cert is not None else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}"


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """Returns what a server speaks TLS by, None for a plain one; ConfigError for files that do not do."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        files = f"tls_cert {config.tls_cert}" + (f" with tls_key {config.tls_key}" if config.tls_key else "")
        raise ConfigError(
            f"{files}: {reason}; wanted a certificate chain and its key in PEM, readable and not encrypted"
        ) from error
    return context


def _no_password() -> str:
    """A key that is encrypted is refused rather than asked about on a terminal."""
    raise ValueError("the key is encrypted")


def allow_files(num_connections: int) -> int:
    """Lets the process open a file a connection, as far as the system allows; returns how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + SPARE_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(num_connections, soft - SPARE_FILES))
