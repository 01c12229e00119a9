"""SentencePiece's order of merges, which its vocabularies give by scores alone."""

from collections.abc import Mapping, Sequence

SPACE = "\u2581"  # how SentencePiece spells a space


def merges_by_score(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, that of the best score first; ids are places in `scores`."""
    found = []
    for text, token_id in ids.items():
        for place in range(1, len(text)):
            left, right = text[:place], text[place:]
            if left in ids and right in ids:
                found.append((-scores[token_id], token_id, -place, left, right))
    return [(left, right) for *_, left, right in sorted(found)]
