"""What of a call fills a step, which the device computes while the others of the call are made."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ..kv_cache.manager import KVCacheManager
from ..protocol.engine_request import EngineRequest
from .parallel_sampling import ParentRequest

Beginning = tuple[str, bytes]  # a salt, and the tokens of a first block


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstStep:
    """The limits of a step that is launched before every request of a call is made.

    It computes what it would with all of them there. The cache is only looked at, in any thread.
    """

    num_tokens: int
    num_rows: int
    chunk: int  # tokens of one request
    kv_cache: KVCacheManager

    def take(self, asked: Iterator[ParentRequest]) -> list[ParentRequest]:
        """Takes as many as fill the step, or all there are.

        All are taken that have a deadline: it counts from when they are queued, which making the others
        should not delay.
        """
        taken: list[ParentRequest] = []
        beginnings: set[Beginning] = set()
        tokens = rows = 0
        for each in asked:
            taken.append(each)
            request = each.submissions[0].request
            tokens += self._count(request, beginnings)
            rows += len(each.submissions)
            is_full = tokens >= self.num_tokens or rows >= self.num_rows
            if is_full and request.timeout is None:
                break
        return taken

    def _count(self, request: EngineRequest, beginnings: set[Beginning]) -> int:
        """Tokens that the step computes of a prompt for certain: none where the prefix cache may have some.

        beginnings: of the prompts before it, and then its own.
        """
        prompt, size = request.prompt_token_ids, self.kv_cache.block_size
        if self.kv_cache.prefix is not None and len(prompt) > size:
            beginning = request.block_salt, struct.pack(f"{size}i", *prompt[:size])
            if beginning in beginnings or self.kv_cache.prefix.has_first(*beginning):
                return 0
            beginnings.add(beginning)
        return min(len(prompt), self.chunk)
