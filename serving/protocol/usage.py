"""How many tokens a request took, as clients count them."""

import msgspec


class PromptTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Of which kinds the tokens of the prompt were."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of a request: each prompt once, whatever its number of answers, and those of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> Usage:
    """Returns the usage; cached_tokens: of the prompts, whose keys and values were in the cache."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens or 0),
    )
