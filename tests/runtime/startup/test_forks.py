"""Processes forked from one that has served: what they inherit says so, what they make themselves works."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, threading, time
import torch
torch.set_num_threads(2)
from lamina import Runtime, SamplingParams, UnsupportedError

folder, cache, compile, how = sys.argv[1], sys.argv[2], sys.argv[3] == "True", sys.argv[4]
params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
settings = dict(device="cpu", dtype="float32", compile=compile, cache_dir=cache)

def answer(runtime):
    return list(runtime.generate([[1, 5, 9, 4] * 30], params)[0].outputs[0].token_ids)

parent = Runtime.from_pretrained(folder, **settings)
wanted = answer(parent)

def child():
    for use in (lambda: answer(parent), parent.stats, parent.idle, parent.explain):
        try:
            use()
        except UnsupportedError as error:
            assert "spawn" in str(error), error
        else:
            raise AssertionError(use)
    parent.close()
    with Runtime.from_pretrained(folder, **settings) as own:
        assert answer(own) == wanted
    return 0

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return child()

if how == "fork":
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code = child()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 200
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.05)
    assert done[1] == 0
else:
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="fork", timeout=200)
    assert [int(each) for each in loader] == [0, 0]
assert answer(parent) == wanted  # the parent goes on
parent.close()
"""


@pytest.mark.parametrize("how, compile", [("fork", True), ("fork", False), ("loader", False)])
def test_a_forked_child_is_told_to_spawn_and_its_own_runtime_works(tiny_folder, compile_cache, how, compile):
    command = [sys.executable, "-c", SCRIPT, str(tiny_folder), str(compile_cache), str(compile), how]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr
    if how == "fork":
        assert result.stderr.count("this process was forked from one whose threads did not come along") == 1
