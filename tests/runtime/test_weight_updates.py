"""Weights replaced while a runtime lives: what it answers afterwards is what a new one of them answers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamina import (
    CompileConfig,
    ConfigError,
    LoadError,
    RequestError,
    Runtime,
    SamplingParams,
    UnsupportedError,
)
from lamina.models.quantization.scheme import scheme_names
from lamina.runtime.startup.identity import system_fingerprint

from .asking import SMALL, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=5)
PROMPTS = [[5, 6, 7], [*range(40, 70)], [7] * 33]


@pytest.fixture(scope="module")
def own(tiny_folder):
    return load_file(tiny_folder / "model.safetensors")


def answers(runtime, prompts=PROMPTS):
    """Tokens, and the bits of what they were chosen by."""
    found = [output.outputs[0] for output in runtime.generate(prompts, GREEDY)]
    return [(one.token_ids, [{i: p.logprob for i, p in at.items()} for at in one.logprobs]) for one in found]


def expected(folder, **settings):
    with Runtime.from_pretrained(folder, **SMALL | settings) as runtime:
        return answers(runtime), system_fingerprint(runtime._loaded)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tensors_and_folders_give_what_a_new_runtime_gives(
    tiny_folder, other_folder, other, own, quantization
):
    settings = SMALL | {"quantization": quantization}
    right, of_other = expected(other_folder, **settings)
    before, of_own = expected(tiny_folder, **settings)
    assert right != before
    with Runtime.from_pretrained(tiny_folder, **settings) as runtime:
        assert answers(runtime) == before
        runtime.update_weights(other)
        assert answers(runtime) == right
        of_tensors = system_fingerprint(runtime._loaded)
        runtime.update_weights(tiny_folder)
        assert answers(runtime) == before
        assert system_fingerprint(runtime._loaded) == of_own
        runtime.update_weights(str(other_folder))
        assert answers(runtime) == right
        assert system_fingerprint(runtime._loaded) == of_other
        runtime.update_weights(own)
        assert answers(runtime) == before
        assert len({of_tensors, of_own, of_other, system_fingerprint(runtime._loaded)}) == 4
        runtime.update_weights(other)
        assert system_fingerprint(runtime._loaded) == of_tensors


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_tensors_of_any_dtype_are_rounded_as_in_a_checkpoint(tiny_folder, other, tmp_path, dtype):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    rounded = {name: tensor.to(dtype) for name, tensor in other.items()}
    save_file(rounded, folder / "model.safetensors")
    right, _ = expected(folder, dtype="float32")
    with Runtime.from_pretrained(tiny_folder, **SMALL, dtype="float32") as runtime:
        runtime.update_weights({name: torch.nn.Parameter(one) for name, one in rounded.items()})
        assert answers(runtime) == right


def test_nothing_is_compiled_or_captured_again(tiny_folder, other_folder, other, compile_cache):
    settings = {"cache_dir": compile_cache, "dtype": "float32", "device": "cpu", "max_num_seqs": 4}
    config = CompileConfig(cuda_graphs="on")
    with Runtime.from_pretrained(other_folder, compile=config, **settings) as runtime:
        right = answers(runtime)
    with Runtime.from_pretrained(tiny_folder, compile=config, **settings) as runtime:
        answers(runtime)
        before, graphs = runtime.stats(), runtime._loaded.cuda_graphs
        captured = {key: id(capture) for key, capture in graphs._captures.items()}
        runtime.update_weights(other)
        assert answers(runtime) == right
        after = runtime.stats()
        assert {key: id(capture) for key, capture in graphs._captures.items()} == captured
        for name in ("compiled", "recompiles", "loaded"):
            assert after["compile"][name] == before["compile"][name]


def test_some_tensors_leave_the_others_as_they_are(tiny_folder, own, other, tmp_path):
    some = {name: tensor for name, tensor in other.items() if "layers.1." in name and "k_proj" not in name}
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    save_file(own | some, folder / "model.safetensors")
    right, _ = expected(folder)
    with Runtime.from_pretrained(tiny_folder, **SMALL) as runtime:
        runtime.update_weights(some)
        assert answers(runtime) == right


@pytest.mark.parametrize("ties", [True, False])
def test_tied_names_are_one_tensor(make_tiny_folder, ties):
    first, second = (make_tiny_folder(seed=seed, tie_word_embeddings=ties) for seed in (0, 1))
    given = load_file(second / "model.safetensors")
    embedding = given["model.embed_tokens.weight"]
    right, _ = expected(second)
    with Runtime.from_pretrained(first, **SMALL) as runtime:
        if ties:
            given["lm_head.weight"] = embedding + 1
            with pytest.raises(RequestError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
                runtime.update_weights(given)
            given["lm_head.weight"] = embedding
        runtime.update_weights(given)
        assert answers(runtime) == right
        if ties:
            runtime.update_weights(first)
            del given["model.embed_tokens.weight"]
            runtime.update_weights(given)
            assert answers(runtime) == right


def spoilt(other, name, value):
    return other | {name: value}


Q = "model.layers.0.self_attn.q_proj.weight"
WRONG = {
    "shape": (
        lambda given: spoilt(given, Q, given[Q][:-1]),
        RequestError,
        r"q_proj.weight has shape \[63, 64\]",
    ),
    "name": (
        lambda given: spoilt(given, "model.layers.7.x", given[Q]),
        RequestError,
        "no place for model.layers.7",
    ),
    "dtype": (lambda given: spoilt(given, Q, given[Q].to(torch.int8)), RequestError, "has dtype torch.int8"),
    "value": (lambda given: spoilt(given, Q, [1.0]), RequestError, "wanted a tensor"),
    "meta": (lambda given: spoilt(given, Q, given[Q].to("meta")), RequestError, "no values"),
    "sparse": (lambda given: spoilt(given, Q, given[Q].to_sparse()), RequestError, "no values"),
    "key": (lambda given: given | {5: given[Q]}, RequestError, "a name of weights is 5"),
    "nothing": (lambda given: {}, RequestError, "no weights were given"),
    "scale": (
        lambda given: spoilt(given, "model.layers.0.self_attn.k_scale", torch.ones(1)),
        UnsupportedError,
        "scale of the KV cache",
    ),
    "kind": (
        lambda given: [*given.items()],
        RequestError,
        "wanted tensors by name, a folder, or a WeightGroup",
    ),
    "folder": (lambda given: "/nowhere/at/all", LoadError, "nowhere"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_amiss_is_said_and_changes_nothing(tiny_folder, other, case):
    make, error, words = WRONG[case]
    with Runtime.from_pretrained(tiny_folder, **SMALL) as runtime:
        before, fingerprint = answers(runtime), system_fingerprint(runtime._loaded)
        with pytest.raises(error, match=words):
            runtime.update_weights(make(other))
        assert not runtime.is_sleeping
        assert answers(runtime) == before
        assert system_fingerprint(runtime._loaded) == fingerprint


@pytest.mark.parametrize("scheme", sorted({*scheme_names()} - {"dense"}))  # which keeps whatever it is given
def test_what_a_scheme_cannot_keep_is_refused_before_anything_is_written(make_tiny_folder, scheme):
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    first, second = (make_tiny_folder(seed=seed, **sizes) for seed in (0, 1))
    given = load_file(second / "model.safetensors")
    try:
        runtime = Runtime.from_pretrained(first, **SMALL, quantization=scheme, dtype="float32")
    except UnsupportedError as error:
        pytest.skip(str(error))
    with runtime:
        before = answers(runtime)
        last = [name for name in given if "down_proj" in name][-1]
        broken = given | {last: torch.full_like(given[last], float("nan"))}
        with pytest.raises(RequestError, match=r"down_proj.weight holds weights that are not finite"):
            runtime.update_weights(broken)
        del given["model.layers.0.self_attn.v_proj.weight"]
        with pytest.raises(RequestError, match=r"v_proj.weight are missing; wanted every part"):
            runtime.update_weights(given)
        assert answers(runtime) == before


def test_another_model_is_no_checkpoint_for_it(tiny_folder, make_tiny_folder):
    with Runtime.from_pretrained(tiny_folder, **SMALL) as runtime:
        before = answers(runtime)
        for overrides in ({"num_hidden_layers": 3}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": True}):
            with pytest.raises(ConfigError, match="is another model, by "):
                runtime.update_weights(make_tiny_folder(**overrides))
        assert answers(runtime) == before


def test_a_folder_that_is_damaged_leaves_the_weights_that_were_there(tiny_folder, other, tmp_path):
    """By what only reading shows: a weight that a scheme cannot keep."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    last = [name for name in other if "down_proj" in name][-1]
    save_file(other | {last: torch.full_like(other[last], float("inf"))}, folder / "model.safetensors")
    with Runtime.from_pretrained(tiny_folder, **SMALL, quantization="int8") as runtime:
        before = answers(runtime)
        with pytest.raises(LoadError, match="not finite"):
            runtime.update_weights(folder)
        assert not runtime.is_sleeping
        assert answers(runtime) == before
        runtime.update_weights(other)  # which are nowhere else
        after = answers(runtime)
        with pytest.raises(LoadError, match="not finite"):
            runtime.update_weights(folder)
        assert runtime.is_sleeping, "it has no weights"
        with pytest.raises(LoadError, match="give all of them again"):
            runtime.wake()
        runtime.update_weights(other)
        runtime.wake()
        assert answers(runtime) == after


def test_it_is_given_its_weights_while_it_sleeps(tiny_folder, other_folder, other):
    right, _ = expected(other_folder)
    some = dict([*other.items()][:3])
    with Runtime.from_pretrained(tiny_folder, **SMALL) as runtime:
        for given in (other, other_folder):
            runtime.sleep(2)
            with pytest.raises(RequestError, match="missing; wanted all weights"):
                runtime.update_weights(some)
            runtime.update_weights(given)
            assert runtime.is_sleeping
            runtime.wake()
            assert answers(runtime) == right
            runtime.update_weights(tiny_folder)
        runtime.update_weights(other)
        runtime.sleep(1)
        runtime.update_weights(some)
        runtime.wake()
        assert answers(runtime) == right
        runtime.sleep(2)
        with pytest.raises(LoadError, match="dropped; give all of them again"):
            runtime.wake()


def test_what_is_being_written_goes_on_with_the_new_weights(tiny_folder, other_folder, other):
    with (
        Runtime.from_pretrained(other_folder, **SMALL) as right,
        Runtime.from_pretrained(tiny_folder, **SMALL) as runtime,
    ):
        runtime.generate([PROMPTS[1]], GREEDY)
        stream = runtime.stream(PROMPTS[0], GREEDY)
        first = next(stream).token_ids
        runtime.update_weights(other)
        rest = tokens_of(stream)
        assert len(first + rest) == GREEDY.max_tokens
        assert runtime.generate([PROMPTS[1]], GREEDY)[0].num_cached_tokens == 0
        of_other = right.generate([[*PROMPTS[0], *first]], GREEDY)[0].outputs[0].token_ids
        assert rest == of_other[: len(rest)]


class Interrupted(BaseException):
    pass


def test_an_interrupt_while_weights_are_written_leaves_it_asleep_and_whole_again(
    tiny_folder, other_folder, other, monkeypatch
):
    right, _ = expected(other_folder)
    with Runtime.from_pretrained(tiny_folder, **SMALL) as runtime:
        before = answers(runtime)
        weights = runtime._loaded.weights
        take, calls = type(weights).take, []

        def interrupted(self, *args):
            calls.append(args)
            if len(calls) == 4:
                raise Interrupted
            take(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(type(weights), "take", interrupted)
            with pytest.raises(Interrupted):
                runtime.update_weights(other)
        assert runtime.is_sleeping
        with pytest.raises(RequestError, match="sleeps"):
            answers(runtime)
        runtime.wake()  # which reads them again
        assert answers(runtime) == before
        runtime.update_weights(other)
        assert answers(runtime) == right


def test_tensors_do_not_replace_what_a_checkpoint_has_quantized(tiny_folder, own, tmp_path):
    from lamina import quantize

    folder = tmp_path / "quantized"
    quantize(tiny_folder, folder, scheme="int8")
    with Runtime.from_pretrained(folder, **SMALL) as runtime:
        before = answers(runtime)
        with pytest.raises(UnsupportedError, match=r"quantized already.*give a folder of the same format"):
            runtime.update_weights(own)
        with pytest.raises(UnsupportedError, match="wanted a checkpoint of the same format"):
            runtime.update_weights(tiny_folder)
        runtime.update_weights({"model.norm.weight": own["model.norm.weight"]})
        runtime.update_weights(folder)
        assert answers(runtime) == before


def test_a_config_that_says_other_ends_is_the_same_model(tiny_folder, other, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 5]}))
    save_file(other, folder / "model.safetensors")
    with Runtime.from_pretrained(tiny_folder, **SMALL) as runtime:
        runtime.update_weights(folder)
