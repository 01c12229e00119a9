"""GET /health/live, /health/ready and /health: whether the process lives, and whether a step can run."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..context import Serving, serving_of
from ..errors import ApiError
from ..lifecycle import loss

RETRY_AFTER = "2"  # seconds


async def live(request: Request) -> JSONResponse:
    """Answers 200 as long as the process can answer at all, whatever the engine does."""
    return JSONResponse({"status": "live"})


async def ready(request: Request) -> Response:
    """Answers 200 where a request would be taken and a step can run, else 503 with the reason.

    The status is starting, ready, draining, failed, stalled where a step takes too long, or asleep.
    """
    report = health_of(serving_of(request))
    if report["reason"] is None:
        return JSONResponse(report)
    error = ApiError(status=503, message=report["reason"], code=report["status"])
    body = {**report, **json.loads(error.body())}
    return JSONResponse(body, status_code=503, headers={"Retry-After": RETRY_AFTER})


def health_of(serving: Serving) -> dict[str, Any]:
    """Returns status and reason, and of the engine the number of steps and what its step now is doing."""
    lifecycle = serving.lifecycle
    report: dict[str, Any] = {"status": lifecycle.state, "reason": lifecycle.reason}
    if serving.loaded is None:
        return report
    health = serving.loaded.runtime.health()
    if not health.ok and lifecycle.state == "ready":
        if health.status.is_alive:
            report = {"status": "stalled", "reason": health.reason}
        else:
            report = {"status": "failed", "reason": loss(health.status)}
    status = health.status
    if status.is_asleep and report["reason"] is None:
        report = {"status": "asleep", "reason": "the engine sleeps, and requests wait; POST /wake_up"}
    return report | {
        "num_steps": status.num_steps,
        "step_seconds": status.step_seconds,
        "building": status.building,
    }


ROUTES = [Route("/health/live", live), Route("/health/ready", ready), Route("/health", ready)]
