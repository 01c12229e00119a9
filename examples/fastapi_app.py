"""A model behind FastAPI: MODEL=folder uvicorn --app-dir examples fastapi_app:app, then POST /generate.

For an OpenAI-compatible server run `lamina serve`; this is how an application of your own holds a model.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from lamina import AsyncRuntime, RequestError, SamplingParams
from lamina.runtime.engine.generation import Generation


class Question(BaseModel):
    """What clients send."""

    prompt: str
    max_tokens: int = 64


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the model before the first request, and give it back after the last."""
    async with await AsyncRuntime.from_pretrained(os.environ["MODEL"]) as runtime:
        app.state.runtime = runtime
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/generate")
async def generate(question: Question, request: Request) -> StreamingResponse:
    """Stream the answer as plain text; a client that goes away ends its request."""
    runtime: AsyncRuntime = request.app.state.runtime
    try:
        generation = runtime.generate(question.prompt, SamplingParams(max_tokens=question.max_tokens))
    except RequestError as error:
        raise HTTPException(status_code=400, detail=str(error)) from error
    return StreamingResponse(texts(generation), media_type="text/plain; charset=utf-8")


@app.get("/health")
async def health(request: Request) -> dict[str, str]:
    """Say whether a request would be answered."""
    found = request.app.state.runtime.health()
    if not found.ok:
        raise HTTPException(status_code=503, detail=found.reason)
    return {"status": "ok"}


async def texts(generation: Generation) -> AsyncIterator[str]:
    """Yield pieces of text; several that piled up for a slow client come as one."""
    while deltas := await generation.read():
        yield "".join(delta.text for delta in deltas)


if __name__ == "__main__":
    raise SystemExit("usage: MODEL=folder uvicorn --app-dir examples fastapi_app:app")
