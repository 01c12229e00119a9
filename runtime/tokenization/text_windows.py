"""A text as windows of token ids: what a model is calibrated on, or its perplexity measured."""

from collections.abc import Sequence
from pathlib import Path

from ...common.errors import ConfigError, LoadError, shown
from .tokenizer import Tokenizer, load_tokenizer

WINDOW = 512  # tokens that follow one another; nothing is known before a window's first
LEAST = 2  # tokens of a text: one to know, and one to follow


def read_windows(
    folder: Path, text: Path, num_tokens: int | None = None, window: int = WINDOW
) -> list[list[int]]:
    """Windows of at most so many tokens in all of a file's text, by the tokenizer of a model's folder.

    Raises LoadError for a file that is no text or has too little of it, and for a folder without a tokenizer.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise LoadError(f"{folder} has no tokenizer, and {text} is text; wanted the model's tokenizer files")
    return text_windows(tokenizer, read_text(text), num_tokens, window)


def read_text(path: Path) -> str:
    """A file's text. LoadError where it cannot be read, or is no UTF-8."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}; wanted a file of text") from error
    except UnicodeDecodeError as error:
        raise LoadError(f"{path} is no UTF-8 text: {error}; convert it") from error


def text_windows(
    tokenizer: Tokenizer, text: str, num_tokens: int | None = None, window: int = WINDOW
) -> list[list[int]]:
    """The text's tokens in windows: all of them, or as many as hold `num_tokens`, spread over all of it.

    Each window begins with the special tokens that the tokenizer puts before a text. Raises LoadError for a
    text of fewer than two tokens, ConfigError for fewer tokens asked for.
    """
    if num_tokens is not None and (isinstance(num_tokens, bool) or num_tokens < LEAST):
        raise ConfigError(f"the number of tokens is {shown(num_tokens)}; wanted an integer >= {LEAST}")
    prefix = _prefix(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < LEAST:
        raise LoadError(f"the text is {len(ids)} tokens; wanted at least {LEAST}")
    step = window - len(prefix)
    starts = [start for start in range(0, len(ids), step) if len(ids) - start >= LEAST]
    windows = [[*prefix, *ids[start : start + step]] for start in starts]
    return windows if num_tokens is None else _spread(windows, num_tokens, window)


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """The special tokens before every text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    count = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    return whole[:count]


def _spread(windows: Sequence[list[int]], num_tokens: int, window: int) -> list[list[int]]:
    """As many windows as hold so many tokens, at equal distances; the last one cut."""
    count = max(1, -(-num_tokens // window))
    if count < len(windows):
        windows = [windows[index * len(windows) // count] for index in range(count)]
    left = num_tokens
    taken = []
    for ids in windows:
        if left >= LEAST:
            taken.append(ids[:left])
            left -= len(ids)
    return taken
