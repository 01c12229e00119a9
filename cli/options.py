"""Options that several commands share, and what is made of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..compiler.config import CompileConfig
    from ..runtime.runtime import Runtime
    from ..runtime.sampling_params import SamplingParams

Model = Annotated[str, typer.Option("--model", "-m", help="A model folder, a .gguf file or a hub id.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens to write at most; else until the model ends.")]
Temperature = Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Choose among the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Choose among the likeliest tokens that sum to p.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens less likely than p times the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
NumAnswers = Annotated[int, typer.Option("--n", help="So many answers to each prompt, drawn apart.")]
Logprobs = Annotated[
    int | None, typer.Option(help="With --json: each token's log-probability, and so many likeliest ones.")
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Quantization = Annotated[str | None, typer.Option(help="int8: projections in one byte a weight, on a CPU.")]
Compile = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile the model, or run it eagerly.")
]
Numerics = Annotated[str, typer.Option(help="fast, or exact: compiled equals eager bit for bit.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence; else what the model allows.")]
WithoutPass = Annotated[
    list[str] | None, typer.Option(help="Leave out a pass of the compiler by its name; may be repeated.")
]
CacheDir = Annotated[Path | None, typer.Option(help="Where compiled code and converted models are kept.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions:
    """How to open a runtime, as asked for on the command line."""

    model: str
    dtype: str
    device: str
    quantization: str | None
    compile: bool
    numerics: str
    max_model_len: int | None
    cache_dir: Path | None
    without_pass: list[str] | None = None

    def open(self) -> "Runtime":
        """The runtime, with its progress on standard error."""
        from .progress import loading_progress

        with loading_progress() as progress:
            from ..runtime.runtime import Runtime

            return Runtime.from_pretrained(
                self.model,
                dtype=self.dtype,
                device=self.device,
                quantization=self.quantization,
                max_model_len=self.max_model_len,
                compile=compile_setting(self.compile, self.without_pass),
                numerics=self.numerics,
                cache_dir=self.cache_dir,
                progress=progress,
            )


def compile_setting(
    compile: bool, without_pass: list[str] | None, verify: bool = True
) -> "bool | CompileConfig":
    """The compiler's settings with some passes left out; ConfigError for a pass that there is not."""
    if not compile or (verify and not without_pass):
        return compile
    from ..compiler.config import CompileConfig
    from ..compiler.passes.pipeline import all_but

    return CompileConfig(passes=all_but(*without_pass) if without_pass else None, verify=verify)


def sampling_params(
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    *,
    n: int = 1,
    logprobs: int | None = None,
) -> "SamplingParams":
    """Checked before anything is loaded, so that a typing error costs no time."""
    from ..runtime.sampling_params import SamplingParams

    return SamplingParams(
        n=n,
        logprobs=logprobs,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
