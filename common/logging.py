"""Loggers below "lamina", at the level of LAMINA_LOG_LEVEL, and lines that are said once."""

import logging

from . import env

_said: set[tuple[str, str]] = set()


def get_logger(name: str) -> logging.Logger:
    """The logger lamina.<name>; the application's own logging configuration wins over ours."""
    root = logging.getLogger("lamina")
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("lamina: %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    if root.level == logging.NOTSET:
        root.setLevel(env.log_level())
    return logging.getLogger(f"lamina.{name}")


def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log a message the first time it is given to this logger in this process."""
    key = (logger.name, message)
    if key not in _said:
        _said.add(key)
        logger.log(level, message)
