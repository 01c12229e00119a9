"""The file of keys, and the keys of the environment: who may ask, checked as it is read."""

import hashlib
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.errors import ConfigError, shown
from ...common.logging import get_logger
from ...common.names import hint
from .key import Entry
from .limits import Limits

logger = get_logger("serving")

MAX_FILE_BYTES = 1 << 20
MAX_PRIORITY = 2**31
LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
FIELDS = ("key", *LIMITS, "priority", "routes", "models", "admin")
HASHED = "sha256:"


def read_key_file(path: Path) -> list[Entry]:
    """Returns the keys of a TOML file, a table [keys.NAME] each.

    Raises ConfigError, which never quotes a key, for a file that cannot be read or says what is not known.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
            mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"api_key_file {shown(str(path))} cannot be read: {error.strerror}") from None
    if mode & stat.S_IROTH:
        logger.warning("every user of this machine can read the keys in %s; chmod 600 it", path)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"api_key_file {shown(str(path))} is over {MAX_FILE_BYTES} bytes")
    return entries_of(_parsed(content, path), str(path))


def entries_of(document: Mapping[str, Any], origin: str) -> list[Entry]:
    """Returns the keys of a parsed file, at least one and no secret twice; else raises ConfigError."""
    tables = document.get("keys")
    if set(document) != {"keys"} or not isinstance(tables, dict) or not tables:
        raise ConfigError(f"{origin} wants a table [keys.NAME] for each key, at least one, and nothing else")
    return distinct([_entry(name, table, origin) for name, table in tables.items()], origin)


def entries_of_environment(secrets: str) -> list[Entry]:
    """Returns a key for each of a comma-separated list, without limits; else raises ConfigError."""
    origin = "LAMINA_API_KEY"
    each = [secret.strip() for secret in secrets.split(",") if secret.strip()]
    return distinct(
        [Entry(name=f"env-{n}", digest=_digest(each[n - 1], origin)) for n in range(1, len(each) + 1)], origin
    )


def distinct(entries: list[Entry], origin: str) -> list[Entry]:
    """Returns these, or raises ConfigError where two have one secret or one name."""
    names, digests = {entry.name for entry in entries}, {entry.digest for entry in entries}
    if len(names) < len(entries) or len(digests) < len(entries):
        raise ConfigError(f"{origin} has two keys of one name or of one secret; wanted each once")
    return entries


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError:
        where = "it is no UTF-8"
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at ([^()]*)\)$", str(error))  # its other words may quote a key
        where = found[1] if found else "no TOML"
    except RecursionError:
        where = "nested too deep"
    raise ConfigError(f"api_key_file {shown(str(path))} is no TOML: {where}")


def _entry(name: str, table: object, origin: str) -> Entry:
    place = f"{origin}: [keys.{shown(name)[1:-1]}]"
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise ConfigError(f"{place}; wanted a name of 1 to 64 letters, digits, - and _")
    if not isinstance(table, dict):
        raise ConfigError(f"{place} is no table; wanted key = ... below it")
    for field in table:
        if field not in FIELDS:
            raise ConfigError(f"{place} has no {shown(field)}; {hint(field, FIELDS, {})}")
    secret = table.get("key")
    if not isinstance(secret, str):
        raise ConfigError(f"{place} has no key = a string")
    limits = {limit: _count(table.get(limit), f"{place} {limit}") for limit in LIMITS}
    return Entry(
        name=name,
        digest=_digest(secret, place),
        limits=Limits(**limits),
        priority=_priority(table.get("priority", 0), f"{place} priority"),
        routes=_strings(table.get("routes"), f"{place} routes", r"/[^*\s]*\*?"),
        models=_strings(table.get("models"), f"{place} models", r".+"),
        admin=_flag(table.get("admin", False), f"{place} admin"),
    )


def _digest(secret: str, place: str) -> bytes:
    if not secret.startswith(HASHED):
        if not secret or secret != secret.strip() or not secret.isascii() or not secret.isprintable():
            raise ConfigError(f"{place} has a key that no header can hold; wanted printable ASCII")
        return hashlib.sha256(secret.encode()).digest()
    if not re.fullmatch(r"[0-9a-fA-F]{64}", secret.removeprefix(HASHED)):
        raise ConfigError(
            f"{place} has a key that begins with {HASHED}; wanted 64 hexadecimal digits after it"
        )
    return bytes.fromhex(secret.removeprefix(HASHED))


def _count(value: object, place: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**53:
        raise ConfigError(f"{place} is {shown(value)}; wanted a whole number, at least 1")
    return value


def _priority(value: object, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_PRIORITY:
        raise ConfigError(f"{place} is {shown(value)}; wanted a whole number, lower is served first")
    return value


def _flag(value: object, place: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{place} is {shown(value)}; wanted true or false")
    return value


def _strings(value: object, place: str, pattern: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(v, str) and re.fullmatch(pattern, v) for v in value):
        example = '["/v1/models", "/v1/chat/*"]' if "/" in pattern else '["llama"]'
        raise ConfigError(f"{place} is {shown(value)}; wanted a list as {example}")
    return tuple(value)
