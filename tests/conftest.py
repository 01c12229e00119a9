"""Shared fixtures: TINY model folders with their oracle, tokenizers made on the spot, and the demo model."""

import copy
import functools
import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "cache_dir" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)

# Before torch reads them: threads that wait let others run, and workers have the cores to share.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
MOST_WORKERS = 4  # each holds a torch and its models

settings.register_profile("ci", max_examples=20, derandomize=True, deadline=None, database=None)
settings.register_profile("prove", max_examples=1000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """--shares: proving is hours of work, which several runs side by side may divide."""
    parser.addoption(
        "--shares",
        type=int,
        default=1,
        metavar="N",
        help="with the profile prove: run an Nth of the examples; give each of N runs a --hypothesis-seed",
    )


@pytest.hookimpl(trylast=True)  # the profile asked for is loaded by now
def pytest_configure(config: pytest.Config) -> None:
    """Few, fixed examples unless --hypothesis-profile asks for more; logs reach pytest, once."""
    logging.getLogger("lamina").addHandler(logging.NullHandler())  # so that it gets none of its own
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("ci")
    elif config.getoption("--shares") > 1:
        share = -(-settings().max_examples // config.getoption("--shares"))
        settings.register_profile("share", settings(), max_examples=share, database=None)
        settings.load_profile("share")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker for each core at hand, up to four; none where a single file is asked for."""
    is_single = len(config.args) == 1 and config.args[0].partition("::")[0].endswith(".py")
    return 0 if is_single else min(len(os.sched_getaffinity(0)), MOST_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none; where nothing else is asked for, skip it and say so."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or _has_gpu():
        return
    if len(gpu_items) < len(items):
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_finish() -> None:
    """A million objects of modules: each collection that looked through them would take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_open() -> Iterator[None]:
    """What a module leaves open is reported of that module, and what it leaves for good is frozen too.

    A runtime that ends has unfrozen what there is.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def make_tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_tiny_folder(**config) -> folder of a random fp32 TINY model, the same for the same settings."""
    made: dict[str, Path] = {}

    def make(*, seed: int = 0, **overrides: Any) -> Path:
        key = repr((seed, sorted(overrides.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny")
            _save_tiny(made[key], seed, overrides)
        return made[key]

    return make


def _save_tiny(folder: Path, seed: int, overrides: dict[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # deep copy: transformers completes a rope dictionary in place
    config = LlamaConfig(**TINY | copy.deepcopy(overrides), initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # made as zeros, which would hide a bias that is dropped
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_folder(make_tiny_folder: Callable[..., Path]) -> Path:
    """A TINY model without a tokenizer; shared, so never written to."""
    return make_tiny_folder()


@pytest.fixture(scope="session")
def tiny_text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TINY model with the byte-level tokenizer and a chat template; shared, so never written to."""
    folder = tmp_path_factory.mktemp("tiny-text")
    _save_tiny(folder, 0, {})
    _byte_level_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def scripted_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """scripted_folder(tokens or logits, files={name: JSON}) -> folder of a model whose answers are given.

    The token after position p has the logits of row p, and the last row's from there on: after a prompt of
    one token the answer is the script. There is no attention, so requests cannot touch each other.
    """
    import json

    import torch
    from safetensors.torch import save_file

    from lamina.models.registry import ModelDefinition, ParameterSpec, register_model

    register_model(
        "ScriptedForCausalLM",
        ModelDefinition(
            parameters=lambda config: {
                "script": ParameterSpec(
                    shape=(config.max_position_embeddings, config.vocab_size), sources=("script",)
                )
            },
            forward=lambda config, weights, token_ids, positions, attend, ops: weights["script"][positions],
            logits=lambda config, weights, hidden, ops: hidden,
        ),
    )
    config = json.loads((tiny_folder / "config.json").read_text())
    config["architectures"] = ["ScriptedForCausalLM"]

    def make(script: Any, files: dict[str, Any] | None = None) -> Path:
        folder = tmp_path_factory.mktemp("scripted")
        contents = {"config.json": {}} | (files or {})
        contents["config.json"] = config | contents["config.json"]
        for name, value in contents.items():
            (folder / name).write_text(json.dumps(value))
        rows = torch.tensor(script)
        if rows.dim() == 1:
            rows = torch.nn.functional.one_hot(rows, config["vocab_size"]) * 20.0
        missing = config["max_position_embeddings"] - len(rows)
        save_file({"script": torch.cat([rows, rows[-1:].expand(missing, -1)])}, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Kernels and compiled loops divide their work, in a worker too."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Inductor keeps what it builds, under names by content and locks of its own: for every worker."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "inductor"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def build_once(build_folder: Path) -> Iterator[None]:
    """What Inductor built in this process for one store is not built again for another."""
    from lamina.common.store import Store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "build_folder", lambda store: build_folder)
        yield


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for cache_dir=, so that tests which compile the same thing compile it once."""
    return tmp_path_factory.mktemp("compile-cache")


@pytest.fixture(scope="session")
def tiny_reference() -> Callable[[Path], Any]:
    """tiny_reference(folder) -> transformers' own eager fp32 model, the oracle."""

    @functools.cache
    def load(folder: Path) -> Any:
        import torch
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model.eval()

    return load


@pytest.fixture(scope="session")
def bbpe_tokenizer() -> Callable[[], Any]:
    """bbpe_tokenizer() -> a fresh byte-level BPE tokenizer: all 256 bytes, a few merges, BOS added."""
    return _byte_level_tokenizer


@pytest.fixture(scope="session")
def spm_tokenizer() -> Callable[[], Any]:
    """spm_tokenizer() -> a fresh SentencePiece-like tokenizer: "▁" for spaces, bytes as a fallback."""
    return _metaspace_tokenizer


def _byte_level_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("t", "h"), ("Ġ", "t")]
    names = [*SPECIAL_TOKENS, *pieces, *("".join(pair) for pair in merges)]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrap(PreTrainedTokenizerFast, tokenizer)


def _metaspace_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "w"), ("o", "r"), ("▁w", "or")]
    letters = ["▁", *(chr(code) for code in range(ord("a"), ord("z") + 1)), "H", "W", ".", ",", "!"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    names = [*SPECIAL_TOKENS[:3], "<unk>", *bytes_, *letters, *("".join(pair) for pair in merges)]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(SPECIAL_TOKENS[:3])
    return _wrap(PreTrainedTokenizerFast, tokenizer)


def _wrap(kind: Any, tokenizer: Any) -> Any:
    wrapped = kind(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's .gguf file, which the Makefile fetches before it runs the tests."""
    if not DEMO_MODEL.exists():
        pytest.skip(f"{DEMO_MODEL.name} is not in cache_dir/models: run `make test`, which fetches it")
    return DEMO_MODEL


@pytest.fixture(scope="session")
def assert_close_to_reference() -> Callable[..., None]:
    """(out, fp32_reference, naive): out may err at most twice as much as the plain low-precision formula."""

    def check(out: Any, reference: Any, naive: Any, floor: float = 1e-6) -> None:
        error = (out.double() - reference.double()).abs().max().item()
        allowed = max(2 * (naive.double() - reference.double()).abs().max().item(), floor)
        assert error <= allowed, (
            f"off by {error:.3g} from the fp32 reference; the naive version allows {allowed:.3g}"
        )

    return check
