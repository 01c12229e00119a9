"""Pieces of one answer that are told as one."""

from ...runtime.engine.outputs import StreamDelta


def joined(first: StreamDelta, second: StreamDelta) -> StreamDelta:
    """Returns two pieces of one answer, the second next to the first, as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (*(first.logprobs or ()), *(second.logprobs or ()))
    return StreamDelta(
        request_id=first.request_id,
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
