"""All keys of a server: found in constant time, read again on SIGHUP."""

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...common import env
from ...common.errors import ConfigError, shown
from ...common.logging import get_logger
from ..config import ServeConfig
from .key import Entry, Key
from .key_file import MAX_PRIORITY, distinct, entries_of_environment, read_key_file
from .limits import Clock, Limits, Meter

logger = get_logger("serving")


class Keys:
    """Who may ask. Without any key everybody may, under the name anonymous."""

    def __init__(
        self, entries: Sequence[Entry] = (), *, path: Path | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._path = path
        self._clock = clock
        self._keys: tuple[Key, ...] = ()
        self._use(entries)
        everybody = Entry(name="anonymous", digest=b"", priority=-MAX_PRIORITY)
        self.anonymous = Key(entry=everybody, meter=Meter(Limits(), clock))

    @classmethod
    def load(cls, config: ServeConfig) -> "Keys":
        """Returns the keys of config.api_key_file and of LAMINA_API_KEY together.

        Raises ConfigError for a bad file, and where there is no key and others than this machine could ask,
        unless config.no_auth says that they may.
        """
        entries = _configured(config.api_key_file)
        if entries and config.no_auth:
            raise ConfigError("no_auth is set and keys are configured; wanted one of them")
        if not entries and not config.no_auth and not (config.uds or is_loopback(config.host)):
            remedy = "give --api-key-file or LAMINA_API_KEY, listen at 127.0.0.1, or say --no-auth"
            raise ConfigError(f"host is {shown(config.host)} and no API key is configured; {remedy}")
        return cls(entries, path=config.api_key_file)

    @property
    def are_open(self) -> bool:
        """Whether everybody may ask, as there is no key."""
        return not self._keys

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all keys."""
        return tuple(key.name for key in self._keys)

    def find(self, secrets: Iterable[bytes]) -> Key | None:
        """Returns the key of the first of these secrets that has one; takes as long whichever it is."""
        if not self._keys:
            return self.anonymous
        found: Key | None = None
        for secret in secrets:
            digest = hashlib.sha256(secret).digest()
            for key in self._keys:
                if hmac.compare_digest(digest, key.entry.digest) and found is None:
                    found = key
        return found

    def reload(self) -> bool:
        """Reads the file again and returns whether that went well; else the keys stay, as the log says."""
        try:
            entries = _configured(self._path)
            if not entries and self._keys:
                raise ConfigError("no key is left; stop the server to have it ask for none")
        except ConfigError as error:
            logger.error("the keys stay as they are: %s", error)
            return False
        self._use(entries)
        logger.warning("read the keys again, %d in all", len(entries))
        return True

    def _use(self, entries: Sequence[Entry]) -> None:
        """Takes these in place of the keys so far; what was used under a name stays used."""
        meters = {key.name: key.meter for key in self._keys}
        for entry in entries:
            meters.setdefault(entry.name, Meter(entry.limits, self._clock)).adopt(entry.limits)
        self._keys = tuple(Key(entry=entry, meter=meters[entry.name]) for entry in entries)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which resolves to whatever it does
        return False


def _configured(path: Path | None) -> list[Entry]:
    entries = [] if path is None else read_key_file(path)
    return distinct(entries + entries_of_environment(env.api_keys()), "the key file with LAMINA_API_KEY")
