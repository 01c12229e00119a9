"""How a server is set up, checked when it is made."""

import os
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from ..common.errors import ConfigError, UnknownSettingError, shown
from ..common.names import refuse_unknown
from ..runtime.validation import check_flag, check_name, check_type, integer, number

PATHS = ("uds", "tls_cert", "tls_key", "api_key_file")
LISTS = ("model_names", "lora_modules", "cors_origins", "open_routes")
FLAGS = (
    "no_auth",
    "cors_credentials",
    "lora_updates",
    "strict_fields",
    "trust_request_chat_template",
    "exit_on_engine_loss",
    "lazy_loading",
    "page",
    "access_log",
    "log_requests",
    "log_text",
)
PARSERS = ("tool_parser", "reasoning_parser")  # which there are is known where they are used
COUNTS = {  # what each may be at least and at most
    "port": (0, 65535),
    "max_restarts": (0, 2**20),
    "max_connections": (1, 2**20),
    "max_body_bytes": (1, 2**31 - 1),
    "max_header_bytes": (256, 2**20),
    "max_waiting": (0, 2**20),
    "max_sequences": (1, 2**16),
    "max_prompts": (1, 2**16),
    "max_allowed_token_ids": (1, 2**20),
    "max_logit_bias": (0, 2**20),
    "max_stop": (0, 2**16),
    "max_bad_words": (0, 2**16),
    "max_logprobs": (0, 2**16),
    "max_prompt_logprobs": (0, 2**31 - 1),
    "max_messages": (1, 2**20),
    "max_unsent_bytes": (1024, 2**31 - 1),
    "max_stored_bytes": (0, 2**40),
    "max_resident": (1, 1024),
    "swap_level": (1, 2),
}
SECONDS = (
    "max_queue_seconds",
    "keep_alive_timeout",
    "header_timeout",
    "body_timeout",
    "send_timeout",
    "comment_interval",
    "stored_seconds",
    "drain_timeout",
    "min_residence",
    "swap_drain_timeout",
)
MAY_BE_ZERO = ("drain_timeout", "min_residence", "swap_drain_timeout")


@refuse_unknown(UnknownSettingError, {})
@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Where a server listens, whom it lets ask, and how much of it.

    Raises ConfigError, naming the field, for a value that it cannot have.
    """

    model_names: tuple[str, ...]
    """Names under which clients ask for the model; the first is the one in lists."""
    lora_modules: tuple[str, ...] = ()
    """LoRA adapters to load before it serves, each as NAME=FOLDER; the setting lora makes room for them."""
    lora_updates: bool = False
    """Whether clients may load and unload adapters, from any folder that the server can read."""
    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 8000
    """Port to listen at; 0 takes a free one and prints it."""
    uds: Path | None = None
    """A unix socket to listen at in place of host and port."""
    root_path: str = ""
    """Path under which a proxy publishes the server, as /lamina."""
    tls_cert: Path | None = None
    """File of the certificate chain in PEM; with it the server speaks TLS."""
    tls_key: Path | None = None
    """File of the certificate's key in PEM; otherwise it is looked for in tls_cert."""
    api_key_file: Path | None = None
    """A TOML file of the keys that clients must show, read again on SIGHUP; LAMINA_API_KEY adds to them."""
    no_auth: bool = False
    """Whether everybody may ask without a key at an address that other machines reach."""
    open_routes: tuple[str, ...] = ()
    """Paths besides /health/live that are read without a key, as /metrics."""
    cors_origins: tuple[str, ...] = ()
    """Origins, as https://example.org, whose pages browsers let read answers; * is any."""
    cors_credentials: bool = False
    """Whether those pages may send cookies and the like; never together with the origin *."""
    strict_fields: bool = False
    """Whether unknown fields of a body are refused; otherwise a header names them."""
    tool_parser: str = "auto"
    """How the model writes calls of tools, as hermes; auto goes by its chat template, none reads none."""
    reasoning_parser: str = "auto"
    """How the model marks reasoning, as think; auto goes by its chat template, none leaves it in the text."""
    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template, a program that can run for long."""
    max_connections: int = 8192
    """Connections that are open at once; one more is answered 503."""
    max_body_bytes: int = 33554432
    """Bytes of a request's body at most; more is answered 413."""
    max_header_bytes: int = 65536
    """Bytes of a request's line and headers at most; more is answered 431."""
    max_waiting: int = 1024
    """Requests that wait for their turn at most; one more is answered 429."""
    max_queue_seconds: float = 600.0
    """Seconds that a request may wait for its turn; it is answered 429 at once where it would be longer."""
    max_sequences: int = 1024
    """Answers of one request, which are its prompts times n or best_of, at most."""
    max_prompts: int = 1024
    """Prompts of one request at most."""
    max_logprobs: int = 20
    """So many of the likeliest tokens are reported beside a token at most, of answers and of prompts."""
    max_prompt_logprobs: int = 262144
    """Log-probabilities of the tokens of one request's prompts at most, with those of the likeliest."""
    max_stop: int = 128
    """Strings, or ids, at which the answers of one request end, at most."""
    max_bad_words: int = 128
    """Words that one request excludes at most."""
    max_allowed_token_ids: int = 32768
    """Ids to which one request restricts its answers at most."""
    max_logit_bias: int = 1024
    """Entries of one request's logit_bias at most."""
    max_messages: int = 8192
    """Messages of one conversation at most."""
    max_unsent_bytes: int = 1048576
    """Bytes of a stream that wait for a client that does not read; more ends the request."""
    keep_alive_timeout: float = 75.0
    """Seconds that a connection may rest between two requests."""
    header_timeout: float = 10.0
    """Seconds in which a request's headers have to arrive."""
    body_timeout: float = 30.0
    """Seconds in which a request's body has to arrive, and one more for each 64 KiB of it."""
    send_timeout: float = 60.0
    """Seconds for which a client may take nothing of a stream that waits for it."""
    comment_interval: float = 15.0
    """Seconds without news after which a stream sends a comment, so that proxies keep it."""
    max_stored_bytes: int = 67108864
    """Bytes of stored responses that are kept for one key; the oldest make room. 0 stores none."""
    stored_seconds: float = 3600.0
    """Seconds for which a stored response is kept."""
    drain_timeout: float = 30.0
    """Seconds that running requests may take after SIGTERM or Ctrl-C; what runs on is ended with an error."""
    max_resident: int = 1
    """Of several models so many at most are awake together; the others sleep until one makes room."""
    min_residence: float = 5.0
    """Seconds for which one of several models stays awake at least, before it makes room for another."""
    swap_drain_timeout: float = 0.0
    """Seconds after which what runs of one of several models is ended for another's sake; 0: as it ends."""
    lazy_loading: bool = False
    """Whether of several models only those that are awake at first are loaded then, the rest when asked."""
    swap_level: int = 1
    """How one of several models sleeps: 1 keeps its weights in the host's memory, 2 reads them again."""
    exit_on_engine_loss: bool = True
    """Whether the process ends, with exit code 1, once its engine is lost; otherwise it answers 503."""
    max_restarts: int = 0
    """Times that an engine which is lost is loaded again, in place of the end of the process."""
    page: bool = True
    """Whether / shows a page to chat with the model and watch the engine."""
    access_log: bool = False
    """Whether each request gets a line of JSON on standard output once it is over."""
    log_requests: bool = False
    """Whether that line has the sampling parameters that were chosen, without text."""
    log_text: bool = False
    """Whether that line has the text of prompts, answers and parameters."""
    otlp_traces_endpoint: str | None = None
    """Where OpenTelemetry traces are sent, as http://localhost:4318/v1/traces; needs lamina[otel]."""

    def __post_init__(self) -> None:
        for name in LISTS:
            self._settle(name, _strings(name, getattr(self, name)))
        for name in FLAGS:
            check_flag(name, getattr(self, name), ConfigError)
        for name, (low, high) in COUNTS.items():
            wanted = f"from {low} to {high}"
            value = getattr(self, name)
            self._settle(
                name, integer(name, value, wanted, low=low, high=high, optional=False, error=ConfigError)
            )
        if self.max_restarts and not self.exit_on_engine_loss:
            got = f"max_restarts is {self.max_restarts} and exit_on_engine_loss False"
            raise ConfigError(f"{got}; wanted one of the two")
        for name in SECONDS:
            zero = name in MAY_BE_ZERO
            wanted = f"{'at least' if zero else 'above'} 0, at most 86400"
            value = number(
                name,
                getattr(self, name),
                wanted,
                high=86400.0,
                zero=zero,
                optional=False,
                error=ConfigError,
            )
            self._settle(name, value)
        for name in PATHS:
            self._settle(name, _path(name, getattr(self, name)))
        self._check_names()
        self._check_parsers()
        self._check_address()
        self._check_cors()
        self._check_traces()

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """The names and folders of adapters to load before it serves."""
        split = [module.partition("=") for module in self.lora_modules]
        return [(name, folder) for name, _, folder in split]

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # only while being built: a checked value in its stored form

    def _check_names(self) -> None:
        if not self.model_names:
            raise ConfigError("model_names is empty; wanted one name or more")
        for name in self.model_names:
            if self.model_names.count(name) > 1:
                raise ConfigError(f"model_names holds {shown(name)} twice; wanted each name once")
        names = [name for name, _ in self.adapters]
        for module, (name, folder) in zip(self.lora_modules, self.adapters, strict=True):
            if not name or not folder or name in self.model_names or names.count(name) > 1:
                wanted = "NAME=FOLDER, of a name that is no other's"
                raise ConfigError(f"lora_modules holds {shown(module)}; wanted {wanted}")

    def _check_parsers(self) -> None:
        for name in PARSERS:
            check_type(name, getattr(self, name), (str,), "the name of a parser, auto or none")

    def _check_address(self) -> None:
        check_type("host", self.host, (str,), "a name or address")
        check_type("root_path", self.root_path, (str,), "a path")
        if not self.host.isascii() or not self.host.isprintable() or not self.host:
            raise ConfigError(f"host is {shown(self.host)}; wanted a name or address, as 127.0.0.1")
        is_path = self.root_path.startswith("/") and not self.root_path.endswith("/")
        if self.root_path and not (is_path and self.root_path.isascii() and self.root_path.isprintable()):
            raise ConfigError(f"root_path is {shown(self.root_path)}; wanted a path as /lamina")
        if self.uds is not None and len(os.fsencode(self.uds)) > 107:
            raise ConfigError(f"uds is {shown(str(self.uds))}; wanted at most 107 bytes, as sockets have it")
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError("tls_key is given without tls_cert; wanted both, or the certificate alone")

    def _check_traces(self) -> None:
        check_type("otlp_traces_endpoint", self.otlp_traces_endpoint, (str, NoneType), "a URL or None")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            wanted = "wanted a URL of OTLP over HTTP, as http://localhost:4318/v1/traces"
            raise ConfigError(f"otlp_traces_endpoint is {shown(endpoint)}; {wanted}")

    def _check_cors(self) -> None:
        for origin in self.cors_origins:
            scheme, separator, rest = origin.partition("://")
            is_origin = separator and scheme and rest and not set(rest) & set("/?#@*, ")
            if origin != "*" and not (is_origin and origin.isascii() and origin.isprintable()):
                raise ConfigError(
                    f"cors_origins holds {shown(origin)}; wanted origins as https://example.org, or *"
                )
        if "*" in self.cors_origins and self.cors_credentials:
            raise ConfigError(
                "cors_origins holds * and cors_credentials is True; wanted the origins by name, "
                "or every page of the web could act in its reader's name"
            )


def _path(name: str, value: Any) -> Path | None:
    check_type(name, value, (str, Path, NoneType), "a file or None")
    if value is None:
        return None
    check_name(name, value)
    if not os.fspath(value):
        raise ConfigError(f"{name} is empty; wanted a file")
    return Path(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    """The texts of a list, or of one text alone."""
    held = (value,) if isinstance(value, str) else value
    if not isinstance(held, (tuple, list)) or not all(
        isinstance(each, str) and each and each.isprintable() for each in held
    ):
        raise ConfigError(f"{name} is {shown(value)}; wanted printable texts")
    return tuple(held)
