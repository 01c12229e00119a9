"""`lamina generate`: continue prompts; the text alone goes to standard output."""

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .streaming import print_stream

if TYPE_CHECKING:
    from ..runtime.outputs import CompletionOutput, RequestOutput
    from ..runtime.runtime import Runtime
    from ..runtime.sampling_params import SamplingParams

Prompts = Annotated[list[str], typer.Argument(metavar="PROMPT", help="Prompts; - reads standard input.")]
Chat = Annotated[
    bool, typer.Option("--chat/--raw", help="Put each prompt through the chat template, or not.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the text.")]


def generate(
    prompts: Prompts,
    model: options.Model,
    chat: Chat = False,
    as_json: Json = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    n: options.NumAnswers = 1,
    logprobs: options.Logprobs = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = None,
    compile: options.Compile = True,
    numerics: options.Numerics = "fast",
    max_model_len: options.MaxModelLen = None,
    cache_dir: options.CacheDir = None,
    without_pass: options.WithoutPass = None,
) -> None:
    """Continue each prompt; the text goes to standard output, progress and figures to standard error."""
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs are told with --json; add it", param_hint="--logprobs")
    params = options.sampling_params(
        max_tokens, temperature, top_k, top_p, min_p, seed, n=n, logprobs=logprobs
    )
    runtime_options = options.RuntimeOptions(
        model=model,
        dtype=dtype,
        device=device,
        quantization=quantization,
        compile=compile,
        numerics=numerics,
        max_model_len=max_model_len,
        cache_dir=cache_dir,
        without_pass=without_pass,
    )
    with runtime_options.open() as runtime:
        inputs = [_templated(runtime, text) for text in texts] if chat else texts
        if as_json:
            _print_json(runtime, texts, inputs, params)
        elif len(inputs) == n == 1:
            _print_stream(runtime, inputs[0], params)
        else:
            _print_texts(runtime, inputs, params)


def _templated(runtime: "Runtime", text: str) -> list[int]:
    return runtime.apply_chat_template([{"role": "user", "content": text}])


def _print_stream(runtime: "Runtime", prompt: str | list[int], params: "SamplingParams") -> None:
    start = time.perf_counter()
    streamed = print_stream(runtime.stream(prompt, params))
    _print_figures(runtime, streamed.num_tokens, time.perf_counter() - start)
    if streamed.interrupted:
        raise typer.Exit(130)


def _print_texts(runtime: "Runtime", prompts: list[Any], params: "SamplingParams") -> None:
    outputs, seconds = _generate(runtime, prompts, params)
    for output in outputs:
        for answer in output.outputs:
            print(answer.text)
    _print_figures(runtime, _num_tokens(outputs), seconds)


def _print_json(runtime: "Runtime", texts: list[str], prompts: list[Any], params: "SamplingParams") -> None:
    outputs, seconds = _generate(runtime, prompts, params)
    rows = [
        {"prompt": text} | _row(answer)
        for text, output in zip(texts, outputs, strict=True)
        for answer in output.outputs
    ]
    document = {"outputs": rows, "tokens": _num_tokens(outputs), "seconds": seconds, "stats": runtime.stats()}
    print(json.dumps(document, indent=2, ensure_ascii=False))


def _row(answer: "CompletionOutput") -> dict[str, Any]:
    row = {
        "index": answer.index,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
    }
    if answer.logprobs is not None:
        row["logprobs"] = [
            [{"token_id": token_id} | asdict(told) for token_id, told in entry.items()]
            for entry in answer.logprobs
        ]
    return row


def _generate(
    runtime: "Runtime", prompts: list[Any], params: "SamplingParams"
) -> tuple[list["RequestOutput"], float]:
    start = time.perf_counter()
    return runtime.generate(prompts, params), time.perf_counter() - start


def _num_tokens(outputs: list["RequestOutput"]) -> int:
    return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)


def _print_figures(runtime: "Runtime", num_tokens: int, seconds: float) -> None:
    rate = f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s)"
    typer.echo(f"{rate}; {_compiled(runtime.stats()['compile'])}", err=True)


def _compiled(pieces: dict[str, Any]) -> str:
    """How the code came about that ran."""
    if not pieces["pieces"]:
        return "not compiled"
    how = "compiled" if pieces["compiled"] else "loaded"
    return f"{pieces['unique_pieces']} pieces {how} in {pieces['seconds']:.2f} s"
