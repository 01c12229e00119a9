"""docs/request_walk.md names what a streamed chat enters on its way through the server, in order."""

import asyncio
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lamina

PACKAGE = Path(lamina.__file__).parent
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "request_walk.md"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}
PERIODIC = {"watch_loop", "_watch", "health", "status"}  # functions that run whether or not anybody asks
ENGINE = ("runtime/async_runtime.py", "runtime/engine/")  # of the runtime, what an event loop's thread enters


def test_the_page_names_every_file_that_a_streamed_chat_enters_in_order(server: Any) -> None:
    entered: list[tuple[str, str]] = []

    def trace(frame: FrameType, kind: str, argument: object) -> None:
        path, callers = Path(frame.f_code.co_filename), {frame.f_code, frame.f_back and frame.f_back.f_code}
        if path.is_relative_to(PACKAGE) and not PERIODIC & {code.co_name for code in callers if code}:
            entered.append((frame.f_code.co_name, path.relative_to(PACKAGE).as_posix()))

    async def set_trace(function: Any) -> None:
        while server.serving.lifecycle.num_running:  # the one before
            await asyncio.sleep(0.01)
        sys.settrace(function)

    assert server.client.post("/v1/chat/completions", json=CHAT).status_code == 200  # imports, and caches
    server.in_loop(lambda: set_trace(trace))
    try:
        assert server.client.post("/v1/chat/completions", json=CHAT).status_code == 200
    finally:
        server.in_loop(lambda: set_trace(None))
    begun = [function for function, _ in entered].index("data_received")  # else of the one before
    files = [
        file
        for file in dict.fromkeys(file for _, file in entered[begun:])
        if file.startswith(("serving/", *ENGINE))
    ]
    section = PAGE.read_text().split("## A chat over HTTP, file by file")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("|")]
    named = [match[1] for row in rows if (match := re.search(r"^\|[^|]*\| \[\S+\]\(\.\./(\S+\.py)\)", row))]
    assert files == named, "what is entered has changed: change the table of docs/request_walk.md likewise"
