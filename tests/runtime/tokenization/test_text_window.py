"""Text of bytes that complete no character, or late: told as soon as it is certain, in linear work."""

# ruff: noqa: F811 (fixtures are imported, then named as arguments)

from collections.abc import Sequence

import pytest
from tokenizers import pre_tokenizers

from lamina.runtime.tokenization.detokenizer import WINDOW, IncrementalDetokenizer
from lamina.runtime.tokenization.tokenizer import Tokenizer

from .test_detokenizer import ids_of, stream, tokenizer  # noqa: F401


class Counted:
    """A tokenizer that counts the tokens it is given to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_decoded = 0
        self.special_tokens = tokenizer.special_tokens
        self.byte_token_ids = tokenizer.byte_token_ids
        self.plain_tokens = tokenizer.plain_tokens
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens)


NUM_TOKENS = 1000
RUNS = {
    "bytes that continue nothing": b"\x80",
    "bytes that begin and go no further": b"\xf0",
    "characters cut apart": "😀".encode()[1:] + "😀".encode()[:1],
    "characters of four bytes": "😀".encode(),
    "characters of three bytes": "你".encode(),
    "letters": b"xy",
    "good and bad bytes": b"x\xff\xe4\xbd",
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("stop", [(), ("never", "\ufffdx")])
def test_work_is_linear_in_the_tokens_whatever_bytes_they_are(
    tokenizer: Tokenizer, run: bytes, stop: Sequence[str]
) -> None:
    counted = Counted(tokenizer)
    token_ids = [byte_ids(tokenizer)[byte] for byte in (run * NUM_TOKENS)[:NUM_TOKENS]]
    detokenizer = IncrementalDetokenizer(counted, prompt_token_ids=ids_of(tokenizer, "hello"), stop=stop)
    text = "".join([*(detokenizer.append([i]) for i in token_ids), detokenizer.finish()])
    assert counted.num_decoded < 4 * WINDOW * NUM_TOKENS
    if detokenizer.stop_reason is None:
        assert "hello" + text == tokenizer.decode(ids_of(tokenizer, "hello") + token_ids)


@pytest.mark.parametrize("run", [b"\x80", b"\xf0", b"x\xff\xe4\xbd"])
def test_bytes_that_complete_no_character_are_told_as_soon_as_they_are_certain(
    tokenizer: Tokenizer, run: bytes
) -> None:
    token_ids = [byte_ids(tokenizer)[byte] for byte in (run * 100)[:100]]
    deltas, _ = stream(tokenizer, token_ids)
    given_out = 0
    for number, delta in enumerate(deltas[:-1], start=1):
        given_out += len(delta)
        assert given_out >= len(tokenizer.decode(token_ids[:number])) - 3


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """The token of each byte."""
    if tokenizer.byte_token_ids:
        return {byte: token_id for token_id, byte in tokenizer.byte_token_ids.items()}
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    low = {byte: spelled.pre_tokenize_str(chr(byte))[0][0] for byte in range(0x80)}
    printable = [*range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if not (0x21 <= byte <= 0x7E or byte in printable)]
    names = low | {byte: chr(byte) for byte in printable}
    names |= {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}
    return {byte: tokenizer._backend.convert_tokens_to_ids(name) for byte, name in names.items()}
