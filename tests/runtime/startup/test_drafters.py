"""Models that draft at a start: counted in, and refused by name where they do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.heads import RandomHead

from lamina import CompileConfig, Draft, Eagle, Runtime, SamplingParams
from lamina.common.errors import ConfigError, LoadError
from lamina.common.progress import say_nothing
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup import loader

PROMPTS = [[5, 6, 7, 8], [9] * 20]
PARAMS = SamplingParams(max_tokens=24, temperature=0.6, seed=1, ignore_eos=True)

LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}


def answers(runtime: Runtime) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in runtime.generate(PROMPTS, PARAMS)]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_second_start_compiles_neither_the_model_nor_its_head(
    tiny_folder: Path, compile_cache: Path, tmp_path: Path
) -> None:
    head = RandomHead(is_third=True, changes=LAYERS, draft_vocab_size=50).save(tmp_path / "head")
    settings: dict[str, Any] = {
        "model": tiny_folder,
        "dtype": "float32",
        "num_kv_blocks": 32,
        "max_num_seqs": 2,
        "cache_dir": compile_cache,
        "compile": CompileConfig(cuda_graphs="on"),  # steps with drafts as they are captured
    }
    drafting = settings | {"speculative": Eagle(model=head, k=2)}
    assert any("drafter" in lack for lack in loader.missing(RuntimeConfig(**drafting), say_nothing).missing)
    with Runtime(RuntimeConfig(**settings)) as runtime:
        plain = answers(runtime)
    with Runtime(RuntimeConfig(**drafting)) as runtime:
        assert answers(runtime) == plain
        stats, text = runtime.stats(), runtime.explain()
        assert stats["speculation"]["draft_tokens"] > 0
        assert stats["cuda_graphs"]["replays"] > 0
        assert "the drafter" in text
    assert loader.missing(RuntimeConfig(**drafting), say_nothing) == loader.warm.Lacks(
        missing=(), unmeasured=()
    )
    with Runtime(RuntimeConfig(**drafting, require_warm=True)) as runtime:
        assert runtime.stats()["compile"]["compiled"] == 0
        assert runtime.stats()["compile"]["loaded"] == stats["compile"]["unique_pieces"]
        assert answers(runtime) == plain


def sizing(model: Path, speculative: Any, **settings: Any) -> Any:
    return loader.sizing(RuntimeConfig(model=model, speculative=speculative, **settings), say_nothing)


def test_weights_and_cache_of_a_drafter_are_counted_in(tiny_folder: Path, tmp_path: Path) -> None:
    head = RandomHead(is_third=False).save(tmp_path)
    alone = sizing(tiny_folder, None, dtype="float32")
    twice = sizing(tiny_folder, Draft(model=tiny_folder), dtype="float32")
    more = sizing(tiny_folder, Eagle(model=head), dtype="float32")
    assert twice.token_bytes == 2 * alone.token_bytes
    assert twice.weight_bytes == 2 * alone.weight_bytes
    assert more.token_bytes == alone.token_bytes * 3 // 2, "a layer beside two"
    held = sum(tensor.nbytes for tensor in RandomHead(is_third=False).tensors().values())
    assert more.weight_bytes == alone.weight_bytes + held


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hidden_size": ({"hidden_size": 32, "head_dim": 16}, r"hidden_size of the target of 32.*has 64"),
    "vocabulary": ({"vocab_size": 330}, r"vocab_size of 330.*has 320"),
    "layers": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, r"layers.*9.*has 2 layers"),
    "no layers named": ({}, r"residual sums of layers \(2, 1, -1\).*has 2 layers"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_head_that_does_not_fit_is_refused_with_both_figures(
    what: str, tiny_folder: Path, tmp_path: Path
) -> None:
    changes, message = REFUSED[what]
    size = changes.get("vocab_size", 320)
    head = RandomHead(is_third=True, changes=changes, draft_vocab_size=size).save(tmp_path)
    with pytest.raises(ConfigError, match=message):
        Runtime.from_pretrained(tiny_folder, speculative=Eagle(model=head), compile=False)


def test_a_head_is_no_model_and_a_model_no_head(tiny_folder: Path, tmp_path: Path) -> None:
    head = RandomHead(is_third=False).save(tmp_path)
    with pytest.raises(ConfigError, match=r"is a head.*speculative=Eagle\(model\)"):
        Runtime.from_pretrained(tiny_folder, speculative=Draft(model=head), compile=False)
    with pytest.raises(LoadError, match=r"no tensor fc\.weight.*Draft\(model\)"):
        Runtime.from_pretrained(tiny_folder, speculative=Eagle(model=tiny_folder), compile=False)
    raw = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(raw | {"architectures": ["EagleLlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"is a head.*speculative=Eagle\(model\)"):
        Runtime.from_pretrained(head, compile=False)


def test_a_drafter_that_is_not_there_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    for speculative in (Draft(model=tmp_path / "none"), Eagle(model=tmp_path / "none")):
        with pytest.raises(LoadError, match="none"):
            Runtime.from_pretrained(tiny_folder, speculative=speculative, compile=False)


def test_a_draft_model_with_other_tokens_is_refused(
    tiny_text_folder: Path,
    make_tiny_folder: Callable[..., Path],
    spm_tokenizer: Callable[[], Any],
    tmp_path: Path,
) -> None:
    larger = make_tiny_folder(vocab_size=321)
    with pytest.raises(ConfigError, match=r"vocabulary of 321 and the model one of 320"):
        Runtime.from_pretrained(make_tiny_folder(), speculative=Draft(model=larger), compile=False)
    other = tmp_path / "other"
    other.mkdir()
    for path in make_tiny_folder().iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    spm_tokenizer().save_pretrained(other)
    with pytest.raises(ConfigError, match=r"another tokenizer: token \d+ is .* there and .* in the model"):
        Runtime.from_pretrained(tiny_text_folder, speculative=Draft(model=other), compile=False)


def test_a_draft_model_whose_vocabulary_is_padded_otherwise_drafts(
    tiny_text_folder: Path, make_tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    padded = make_tiny_folder(vocab_size=330)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((padded / name).read_bytes())
    for path in tiny_text_folder.glob("*token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings: dict[str, Any] = {"compile": False, "num_kv_blocks": 32, "dtype": "float64"}
    with Runtime.from_pretrained(tiny_text_folder, **settings) as runtime:
        plain = answers(runtime)
    draft = Draft(model=tmp_path)
    with Runtime.from_pretrained(tiny_text_folder, speculative=draft, **settings) as runtime:
        assert answers(runtime) == plain
        assert runtime.stats()["speculation"]["draft_tokens"] > 0
