"""What each engine is given of settings and GPUs, and what cannot be shared out."""

import pytest

from lamina import ConfigError, Runtime
from lamina.runtime.core_choice import core_handle
from lamina.runtime.data_parallel.gathering import merged_fingerprints, merged_stats
from lamina.runtime.data_parallel.shares import num_gpus, shares
from lamina.runtime.startup.threads import choose_threads


def test_engines_have_gpus_after_each_other(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-a,6,7,9")
    found = shares({"data_parallel": 2, "tensor_parallel": 2})
    assert [share.gpus for share in found] == [("4", "GPU-a"), ("6", "7")]
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in found] == ["4,GPU-a", "6,7"]
    assert {"PATH"} <= found[0].environment.keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel": 3}, "takes 3 GPUs; 2 are visible"),
        ({"data_parallel": 2, "tensor_parallel": 2, "device": "cuda"}, "takes 4 GPUs; 2 are visible"),
        ({"data_parallel": 2, "device": "cuda:1"}, "device is 'cuda:1'.*wanted auto, cpu or cuda"),
        ({"data_parallel": 0}, "data_parallel is 0; wanted an integer, from 1"),
        ({"data_parallel": "2"}, "data_parallel is '2'"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(monkeypatch, settings, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match=message):
        shares(settings)


def test_on_the_cpu_engines_have_this_processs_environment_and_logs_of_their_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = shares({"data_parallel": 2, "device": "cpu", "record": "/logs/all.jsonl"})
    assert [(share.gpus, share.environment) for share in found] == [((), None)] * 2
    assert [share.settings["record"] for share in found] == ["/logs/all.0.jsonl", "/logs/all.1.jsonl"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert shares({"data_parallel": 2})[1].gpus == ()
    with pytest.raises(ConfigError, match="0 are visible"):
        shares({"data_parallel": 2, "device": "cuda"})


def test_on_a_ray_cluster_that_all_share_gpus_are_given_out_by_it(monkeypatch):
    settings = {"data_parallel": 2, "tensor_parallel": 2, "executor": "ray"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert [(share.gpus, share.environment) for share in shares(settings)] == [((), None)] * 2
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConfigError, match="RAY_ADDRESS is not set; wanted the address of a cluster"):
        shares(settings)


def test_gpus_are_counted_as_the_driver_names_them(tmp_path):
    assert num_gpus(tmp_path / "none") == 0
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert num_gpus(tmp_path) == 2


def test_engines_share_the_cores():
    whole = choose_threads()
    assert choose_threads(10**6).count in (1, whole.count)  # the latter where the user chose


def test_who_has_one_engine_says_who_has_several(tiny_folder):
    with pytest.raises(ConfigError, match=r"data_parallel is 2; wanted 1 of a Runtime.*lamina serve"):
        Runtime.from_pretrained(tiny_folder, data_parallel=2)
    with pytest.raises(ConfigError, match="engine is 'thread' and data_parallel 2; wanted engine='process'"):
        core_handle("thread", tiny_folder, {"data_parallel": 2}, lambda *_: None)


def test_figures_of_all_are_sums_and_each_ones_are_beside_them():
    one = {
        "blocks": {"total": 9, "free": 2},
        "requests": {"running": 1},
        "preemptions": 1,
        "forced_tokens": 0,
        "speculation": {"drafts": 1, "accepted_by_place": [3]},
        "swap": {"used": 0},
        "prefix_cache": {"hit_tokens": 3},
        "cuda_graphs": {"sizes": [("decode", 1)], "replays": 2, "mode": "lazy"},
        "resolved": {"device": "cpu"},
    }
    two = {
        **one,
        "blocks": {"total": 9, "free": 5},
        "speculation": {"drafts": 0, "accepted_by_place": [1, 2]},
    }
    found = merged_stats({0: one, 1: two})
    assert found["blocks"] == {"total": 18, "free": 7}
    assert found["preemptions"] == 2
    assert found["speculation"] == {"drafts": 1, "accepted_by_place": [4, 2]}
    assert found["cuda_graphs"] == {"sizes": [("decode", 1)], "replays": 4, "mode": "lazy"}
    assert found["resolved"] == {"device": "cpu"}
    assert found["engines"] == {"0": one, "1": two}


def test_a_fingerprint_of_engines_that_differ_is_none_of_theirs():
    assert merged_fingerprints({0: "fp_a", 1: "fp_a"}) == "fp_a"
    assert merged_fingerprints({0: "fp_a", 1: "fp_b"}) == merged_fingerprints({0: "fp_b", 1: "fp_a"})
    assert merged_fingerprints({0: "fp_a", 1: "fp_b"}) not in ("fp_a", "fp_b")
