"""A start gives the tokens of the model it is asked for, whatever is set around it or lies in the cache."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from lamina import Runtime, SamplingParams
from lamina.models import registry
from lamina.models.families import llama
from lamina.models.registry import ModelDefinition, register_model

PROMPTS = [[1, 17, 300, 42], [5, 9]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ARCHITECTURE = "BranchingForCausalLM"


def branching(config, weights, token_ids, positions, attend, ops):
    """LLaMA, but for what a field says that is of no use to its trace otherwise."""
    hidden = llama.forward(config, weights, token_ids, positions, attend, ops)
    return hidden * -1 if config.rope.theta > 10_000 else hidden


@pytest.fixture
def branching_model(monkeypatch):
    """An architecture whose forward branches on the rope's base."""
    monkeypatch.setattr(registry, "_definitions", dict(registry._definitions))
    definition = ModelDefinition(parameters=llama.parameters, forward=branching, logits=llama.logits)
    register_model(ARCHITECTURE, definition)
    return definition


def tokens(folder, cache, **settings):
    with Runtime.from_pretrained(
        folder, cache_dir=cache, max_model_len=64, max_num_seqs=2, **settings
    ) as runtime:
        answers = runtime.generate(PROMPTS, GREEDY)
        capturing = runtime.stats()["startup"].get("capture", 0.0)
    return [answer.outputs[0].token_ids for answer in answers], capturing > 0


def branching_folder(make_tiny_folder, tmp_path, theta):
    folder = tmp_path / f"theta-{theta:g}"
    source = make_tiny_folder(
        num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    folder.mkdir()
    for path in source.iterdir():
        text = path.read_bytes()
        (folder / path.name).write_bytes(text.replace(b"LlamaForCausalLM", ARCHITECTURE.encode()))
    return folder


def test_two_models_that_differ_in_one_field_share_a_cache_and_no_plan(
    branching_model, make_tiny_folder, tmp_path
):
    folders = [branching_folder(make_tiny_folder, tmp_path, theta) for theta in (10_000.0, 500_000.0)]
    expected = [tokens(folder, tmp_path / "eager", compile=False)[0] for folder in folders]
    assert expected[0] != expected[1]
    for _ in range(2):
        for folder, right in zip(folders, expected, strict=True):
            found, was_captured = tokens(folder, tmp_path / "cache")
            assert found == right
    assert not was_captured


def test_a_definition_made_with_other_arguments_is_another_model(branching_model, make_tiny_folder, tmp_path):
    """Two definitions of one function, as a partial or a package may make them."""
    folder = branching_folder(make_tiny_folder, tmp_path, 10_000.0)

    def scaled(factor):
        def forward(config, weights, token_ids, positions, attend, ops):
            return llama.forward(config, weights, token_ids, positions, attend, ops) * factor

        return replace(branching_model, forward=forward)

    for factor in (1.0, -1.0):
        registry._definitions[ARCHITECTURE] = scaled(factor)
        right, _ = tokens(folder, tmp_path / "eager", compile=False)
        assert tokens(folder, tmp_path / "cache")[0] == right


def test_nothing_ambient_is_captured_or_counts_in_a_step(make_tiny_folder, tmp_path):
    folder = make_tiny_folder(num_hidden_layers=1)
    right, _ = tokens(folder, tmp_path / "eager", compile=False)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), np.errstate(all="raise"):
            cold, was_captured = tokens(folder, tmp_path / "cache")
            eager, _ = tokens(folder, tmp_path / "eager", compile=False)
            assert torch.get_default_dtype() == torch.float64
            assert torch.is_autocast_enabled("cpu")
            assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert was_captured
    assert cold == eager == right
    warm, _ = tokens(folder, tmp_path / "cache", require_warm=True)
    assert warm == right


def test_generating_inside_a_users_compiled_function_is_generating(make_tiny_folder, tmp_path):
    folder = make_tiny_folder(num_hidden_layers=1)
    with Runtime.from_pretrained(folder, cache_dir=tmp_path, max_model_len=64, compile=False) as runtime:
        right = runtime.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids

        compiled = []

        def count(module, inputs):
            compiled.append(module.code)
            return module.forward

        @torch.compile(backend=count)
        def theirs(x):
            ids = runtime.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids
            streamed = [delta.token_ids for delta in runtime.stream(PROMPTS[0], GREEDY)]
            return x * 2, ids, streamed

        doubled, ids, streamed = theirs(torch.ones(2))
        assert ids == right
        assert [one for piece in streamed for one in piece] == list(right)
        assert doubled.tolist() == [2.0, 2.0]
        assert len(compiled) <= 1, "something of ours was compiled with it"
    torch._dynamo.reset()


ROUNDS = 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_threads_runtimes_folders_and_a_users_compiled_function_share_a_process(make_tiny_folder, tmp_path):
    """In each round two threads open two runtimes each, on a cache of their own; some rounds are cold."""
    compiled = []

    def count(module, inputs):
        compiled.append(module)
        return module.forward

    theirs = torch.compile(lambda x: x * 2 + 1, backend=count)
    theirs(torch.ones(3))
    folders = [make_tiny_folder(num_hidden_layers=1, rms_norm_eps=eps) for eps in (1e-6, 1e-5)]
    right = [tokens(folder, tmp_path / "eager", compile=False)[0] for folder in folders]

    def work(name, round_):
        for folder, expected in zip(folders, right, strict=True):
            found, _ = tokens(folder, tmp_path / f"{name}{round_ // 50}")
            assert found == expected
            assert theirs(torch.ones(3)).tolist() == [3.0] * 3

    with ThreadPoolExecutor(2) as pool:
        for round_ in range(ROUNDS):
            for job in [pool.submit(work, name, round_) for name in ("a", "b")]:
                job.result()
            assert len(compiled) == 1, round_
