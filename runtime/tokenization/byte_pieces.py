"""Bytes of tokens that are parts of a character, as vocabularies spell them."""

import re

REPLACEMENT = "\ufffd"  # stands in text for bytes that are no character
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letter of each byte in byte-level vocabularies: itself where it prints, else one from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


BYTE_OF_LETTER = _byte_letters()


def bytes_of_piece(piece: str, text: str) -> bytes:
    """Returns the bytes of a token whose text is not all there is of it, else those of its text.

    piece: as the vocabulary spells it: <0xE2> with SentencePiece, a letter a byte with byte-level ones.
    """
    if found := BYTE_TOKEN.fullmatch(piece):
        return bytes([int(found[1], 16)])
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in piece) if piece else text.encode()
    except KeyError:
        return text.encode()
