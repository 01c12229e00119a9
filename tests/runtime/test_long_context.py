"""How many positions a checkpoint is meant for, and what it takes to have more."""

import json
import shutil

import pytest

from lamina import ConfigError, Runtime, SamplingParams

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = [
    ({"rope_type": "default"}, 256, 256),
    ({"rope_type": "linear", "factor": 2.0}, 256, 512),
    ({"rope_type": "dynamic", "factor": 2.0}, 256, 512),
    (YARN, 256, 256),
    (YARN, 64, 256),
    (YARN, 300, 300),
    (LLAMA3, 256, 256),
]


@pytest.fixture
def folder_of(tiny_folder, tmp_path):
    def make(rope, positions):
        shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
        config = json.loads((tiny_folder / "config.json").read_text())
        config |= {"rope_parameters": {"rope_theta": 10000.0, **rope}, "max_position_embeddings": positions}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


@pytest.mark.parametrize("rope, positions, declared", ROPES, ids=str)
def test_more_positions_than_declared_are_refused_unless_asked_for(
    folder_of, caplog, rope, positions, declared
):
    folder = folder_of(rope, positions)
    with Runtime.from_pretrained(folder, compile=False, max_model_len=declared) as runtime:
        assert runtime.stats()["resolved"]["max_model_len"] == declared
    wanted = (
        rf"max_model_len is {declared + 1}, but .* {declared} positions .*{rope['rope_type']}.*allow_long"
    )
    with pytest.raises(ConfigError, match=wanted):
        Runtime.from_pretrained(folder, compile=False, max_model_len=declared + 1)
    longer = {"max_model_len": declared + 8, "allow_long_context": True, "num_kv_blocks": 64}
    caplog.clear()
    with Runtime.from_pretrained(folder, compile=False, **longer) as runtime:
        prompt = [1, 5] * (declared // 2) + [7]
        output = runtime.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))[0]
        assert len(output.outputs[0].token_ids) == 4
    assert [m for m in caplog.messages if f"meant for {declared} positions" in m]


def test_without_a_wish_the_context_is_the_checkpoints_own(folder_of):
    with Runtime.from_pretrained(folder_of(YARN, 64), compile=False) as runtime:
        assert runtime.stats()["resolved"]["max_model_len"] == 64
