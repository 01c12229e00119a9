"""POST /classify: the classes of each text, as vLLM answers them."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..context import serving_of
from ..middleware.body import read_body
from ..protocol.pooling import ClassificationRequest, texts_of
from ..streaming.handlers import receive
from ..streaming.pooling import named_errors, pool


async def classify(request: Request) -> Response:
    """Answers how likely each class is of one or many texts."""
    received = await receive(request, ClassificationRequest, await read_body(request))
    given, serving = received.given, serving_of(request)
    processor = serving.runtime.pooling
    with named_errors():
        spec = processor.spec_for("classify")
        params = processor.own_params(spec, given.activation)
        planned = processor.texts(spec, texts_of(given.input, serving.config), given.text_options(), "input")
    pooled = await pool(request, received, planned, params, "classify")
    found = enumerate(processor.classes(pooled.outputs))
    return pooled.listed(
        [
            {"index": index, "label": each.label, "probs": each.probs, "num_classes": len(each.probs)}
            for index, each in found
        ]
    )


ROUTES: list[BaseRoute] = [Route("/classify", classify, methods=["POST"])]
