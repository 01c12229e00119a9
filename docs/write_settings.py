"""Write docs/settings.md: every field of the typed configs with its type, default and sentence."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from lamina.cli.fields import Field, read_fields  # noqa: E402  (the line above says where it is)

PAGE = ROOT / "docs" / "settings.md"
OPENING = """# Every setting in a sentence

Written by `make format` out of the typed configs; each field is checked when it is given, and an error names
the field, the value and what was wanted. On the command line a field is an option: `max_model_len`
is `--max-model-len`; what is True by default is switched off by `--no-…`. [from_vllm.md](from_vllm.md) has
the names that vLLM has for them.
"""
# What a caller meets, from the outside in: heading, how it is given, file, class
CONFIGS = (
    (
        "A runtime",
        "`Runtime.from_pretrained(model, **settings)`, and options of every command",
        "runtime/config.py",
        "RuntimeConfig",
    ),
    ("The compiler", "`compile=CompileConfig(...)`", "compiler/config.py", "CompileConfig"),
    (
        "Sampling",
        "`SamplingParams(...)`, and options of `generate` and `chat`",
        "runtime/sampling_params.py",
        "SamplingParams",
    ),
    ("Beam search", "`BeamSearchParams(...)`", "runtime/engine/beam_search.py", "BeamSearchParams"),
    (
        "A request",
        "`generate(prompts, params, **options)` and its like",
        "runtime/request_options.py",
        "RequestOptions",
    ),
    ("A server", "Options of `lamina serve`; [serving.md](serving.md)", "serving/config.py", "ServeConfig"),
    (
        "Replicas behind Ray Serve",
        "Options of `lamina serve --ray` with `ray_` before them; [data_parallelism.md](data_parallelism.md)",
        "serving/ray_config.py",
        "RayServeConfig",
    ),
)
# Variables of the environment, which common/env.py alone reads.
VARIABLES = """
## The environment

| variable | is |
|---|---|
| `LAMINA_CACHE_DIR` | where compiled code and converted models are kept, unless `cache_dir` says otherwise |
| `LAMINA_LOG_LEVEL` | DEBUG, INFO, WARNING (the default) or ERROR |
| `CXX` | the C++ compiler that kernels are built with |
| `CUDA_HOME` | the folder of the CUDA toolkit |
| `OMP_NUM_THREADS` | threads of a step on a CPU |
| `CUDA_VISIBLE_DEVICES` | the GPUs that a process may use, which engines and workers share out |
| `RAY_ADDRESS` | the Ray cluster that `executor="ray"` joins; without it one starts on this machine |
| `GLOO_SOCKET_IFNAME` | the network interface over which ranks talk, but for tensors on GPUs |
| `NCCL_NVLS_ENABLE` | whether NCCL sums in switches between GPUs: 0 unless it is set |
| `LAMINA_API_KEY` | API keys that a server asks for, separated by commas |
| `HF_TOKEN` | the access token for hubs, unless `token` says otherwise |
| `HF_HOME`, `HF_HUB_OFFLINE` | where models from a hub are kept; 1 asks no hub (huggingface_hub) |
"""


def render() -> str:
    """The page as it should be now."""
    return OPENING + "".join(_section(*config) for config in CONFIGS) + VARIABLES


def _section(heading: str, how: str, path: str, class_name: str) -> str:
    rows = "".join(_row(field) for field in read_fields(path, class_name))
    return f"\n## {heading}\n\n{how}.\n\n| field | type | default | is |\n|---|---|---|---|\n{rows}"


def _row(field: Field) -> str:
    default = "must be given" if field.default is None else f"`{field.default}`"
    kind = field.type.replace("|", "\\|")
    return f"| `{field.name}` | `{kind}` | {default} | {field.sentence} |\n"


if __name__ == "__main__":
    PAGE.write_text(render())
