"""GET /health/live, /health/ready and /health: whether the process lives, and whether a step can run."""

import json
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..context import Serving
from ..errors import ApiError
from ..lifecycle import Lifecycle, loss
from ..model_swap.swapper import Swapper
from ..served_models import ServedModels, models_of

if TYPE_CHECKING:
    from ...runtime.engine.async_client import EngineHealth

RETRY_AFTER = "2"  # seconds


async def live(request: Request) -> JSONResponse:
    """Answers 200 as long as the process can answer at all, whatever the engine does."""
    return JSONResponse({"status": "live"})


async def ready(request: Request) -> Response:
    """Answers 200 where a request would be taken and a step can run, else 503 with the reason.

    The status is starting, ready, draining, failed, stalled where a step takes too long, or asleep. Of
    several models `models` has that of each: one that waits for its turn is swapped_out, one that was not
    asked yet may be not_loaded, and neither is a reason not to be ready.
    """
    models = models_of(request)
    report = health_of(models.first) if len(models) == 1 else health_of_all(request, models)
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
    report |= {
        "num_steps": status.num_steps,
        "step_seconds": status.step_seconds,
        "building": status.building,
    }
    engines = serving.loaded.runtime.engines()
    return report if len(engines) == 1 else report | {"engines": [engine_report(each) for each in engines]}


def engine_report(engine: "EngineHealth") -> dict[str, Any]:
    """Returns how one of several engines is, and why it is not well."""
    return {
        "engine": engine.number,
        "state": engine.state,
        "reason": engine.health.reason,
        "num_requests": engine.num_requests,
    }


def health_of_all(request: Request, models: ServedModels) -> dict[str, Any]:
    """Returns status and reason of the server, which is ready where a model can serve and none is lost.

    models: what health_of() says of each, by its first name.
    """
    lifecycle: Lifecycle = request.app.state.lifecycle
    report: dict[str, Any] = {"status": lifecycle.state, "reason": lifecycle.reason}
    each = {serving.config.model_names[0]: _turn_of(serving, models.swapper) for serving in models}
    unready = {name: one for name, one in each.items() if one["reason"] is not None}
    lost = {name: one for name, one in unready.items() if one["status"] == "failed"}
    worst = lost or (unready if len(unready) == len(each) else {})
    if report["reason"] is None and worst:
        name, one = next(iter(worst.items()))
        report = {"status": one["status"], "reason": f"{name}: {one['reason']}"}
    return report | {"models": each}


def _turn_of(serving: Serving, swapper: Swapper | None) -> dict[str, Any]:
    """What health_of() says, with where the model stands in place of ready, and of asleep unless by hand."""
    report = health_of(serving)
    if swapper is None:
        return report
    standing = swapper.standing(serving.config.model_names[0])
    is_resident = standing in ("resident", "draining")
    if report["status"] == "ready" and is_resident:
        return report | {"status": standing}
    if report["status"] != "failed" and standing in ("swapped_out", "not_loaded"):
        return report | {"status": standing, "reason": None}
    return report


ROUTES = [Route("/health/live", live), Route("/health/ready", ready), Route("/health", ready)]
