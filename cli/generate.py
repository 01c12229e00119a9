"""`lamina generate`: continue prompts; the text alone goes to standard output."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .standard_streams import read_all
from .streaming import print_stream

if TYPE_CHECKING:
    from ..runtime.engine.outputs import CompletionOutput, RequestOutput
    from ..runtime.runtime import Runtime
    from ..runtime.sampling_params import SamplingParams

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL PROMPT...",
        help="A model folder, a .gguf file or a hub id; then prompts, - for standard input.",
        show_default=False,
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat/--raw", help="Put each prompt through the chat template, or not.")
]


@options.spread
def generate(
    words: Words,
    sampling: options.Sampling,
    settings: options.Settings,
    chat: Chat = False,
    as_json: options.Json = False,
) -> None:
    """Continue each prompt; the text goes to standard output, progress and figures to standard error."""
    model, prompts = settings.split(words)
    if not as_json and (sampling["logprobs"] is not None or sampling["prompt_logprobs"] is not None):
        raise typer.BadParameter("they are printed with --json alone; add it", param_hint="--logprobs")
    params = sampling.params()
    texts = [read_all() if prompt == "-" else prompt for prompt in prompts]
    with settings.open(model) as runtime:
        inputs = [_templated(runtime, text) for text in texts] if chat else texts
        if chat:
            params = runtime.chat_params(params)
        if as_json:
            _print_json(runtime, texts, inputs, params)
        elif len(inputs) == params.n == 1:
            _print_stream(runtime, inputs[0], params)
        else:
            _print_texts(runtime, texts, inputs, params)


def _templated(runtime: "Runtime", text: str) -> list[int]:
    return runtime.apply_chat_template([{"role": "user", "content": text}])


def _print_stream(runtime: "Runtime", prompt: str | list[int], params: "SamplingParams") -> None:
    streamed = print_stream(runtime.stream(prompt, params))
    _say(runtime, streamed.figures())
    if streamed.interrupted:
        raise typer.Exit(130)


def _print_texts(
    runtime: "Runtime", texts: Sequence[str], prompts: list[Any], params: "SamplingParams"
) -> None:
    """Each answer below a line that says of which prompt it is, since answers have lines of their own."""
    outputs, seconds = _generate(runtime, prompts, params)
    for number, (text, output) in enumerate(zip(texts, outputs, strict=True), 1):
        for answer in output.outputs:
            which = f" answer {answer.index + 1} of {params.n}" if params.n > 1 else ""
            print(f"=== prompt {number} of {len(texts)}{which}: {_line(text)}\n{answer.text}")
    _say(runtime, _figures(outputs, seconds))


def _line(text: str, longest: int = 60) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _print_json(runtime: "Runtime", texts: list[str], prompts: list[Any], params: "SamplingParams") -> None:
    outputs, seconds = _generate(runtime, prompts, params)
    rows = [
        {"prompt": text} | _row(answer, output)
        for text, output in zip(texts, outputs, strict=True)
        for answer in output.outputs
    ]
    document = {"outputs": rows, "tokens": _num_tokens(outputs), "seconds": seconds, "stats": runtime.stats()}
    print(json.dumps(document, indent=2, ensure_ascii=False))


def _row(answer: "CompletionOutput", output: "RequestOutput") -> dict[str, Any]:
    row = {
        "index": answer.index,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "seconds_to_first_token": output.seconds_to_first_token,
        "seconds_between_tokens": output.seconds_between_tokens,
    }
    if answer.logprobs is not None:
        row["logprobs"] = [_logprobs(entry) for entry in answer.logprobs]
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [
            None if entry is None else _logprobs(entry) for entry in output.prompt_logprobs
        ]
    return row


def _logprobs(entry: dict[int, Any]) -> list[dict[str, Any]]:
    return [{"token_id": token_id} | asdict(logprob) for token_id, logprob in entry.items()]


def _generate(
    runtime: "Runtime", prompts: list[Any], params: "SamplingParams"
) -> tuple[list["RequestOutput"], float]:
    start = time.perf_counter()
    return runtime.generate(prompts, params), time.perf_counter() - start


def _num_tokens(outputs: list["RequestOutput"]) -> int:
    return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)


def _figures(outputs: list["RequestOutput"], seconds: float) -> str:
    """Of several requests served together, whose prompts and answers share steps."""
    first = [output.seconds_to_first_token for output in outputs]
    latest = max((each for each in first if each is not None), default=0.0)
    num_tokens = _num_tokens(outputs)
    return (
        f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s together); "
        f"first tokens within {latest:.2f} s"
    )


def _say(runtime: "Runtime", figures: str) -> None:
    typer.echo(f"{figures}; {_compiled(runtime.stats()['compile'])}", err=True)


def _compiled(pieces: dict[str, Any]) -> str:
    """How the code came about that ran."""
    if not pieces["pieces"]:
        return "not compiled"
    how = "compiled" if pieces["compiled"] else "loaded"
    return f"{pieces['unique_pieces']} pieces {how} in {pieces['seconds']:.2f} s"
