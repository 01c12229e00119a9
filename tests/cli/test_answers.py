"""generate and chat with a real, tiny model: the text alone on standard output, everything else beside it."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lamina import Runtime, SamplingParams
from lamina.cli import main
from lamina.cli.streaming import print_stream

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT = "hello the world"
GREEDY = ("--temperature", "0", "--max-tokens", "6", "--no-compile")


@pytest.fixture
def lamina(tiny_text_folder, monkeypatch, capsys):
    """lamina(command, *arguments, stdin="") -> (exit code, standard output, standard error)."""

    def run(command, *arguments, stdin=""):
        argv = ["lamina", command, "--model", str(tiny_text_folder), *GREEDY, *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def answers(tiny_text_folder):
    """What the library itself says to some prompts."""
    params = SamplingParams(temperature=0, max_tokens=6)
    with Runtime.from_pretrained(str(tiny_text_folder), compile=False) as runtime:
        chat = runtime.chat([{"role": "user", "content": PROMPT}], params).text
        return {"raw": [output.text for output in runtime.generate([PROMPT, "th"], params)], "chat": chat}


def test_a_prompt_is_answered_by_the_text_alone(lamina, answers):
    code, out, err = lamina("generate", PROMPT)
    assert (code, out) == (0, answers["raw"][0] + "\n")
    assert "tokens/s" in err
    assert "not compiled" in err


def test_several_prompts_are_answered_in_order_each_below_its_own_line(lamina, answers):
    code, out, err = lamina("generate", PROMPT, "th")
    heads = [f"=== prompt 1 of 2: {PROMPT}\n", "=== prompt 2 of 2: th\n"]
    assert (code, out) == (
        0,
        "".join(f"{head}{text}\n" for head, text in zip(heads, answers["raw"], strict=True)),
    )
    assert "first tokens within" in err


def test_the_model_may_be_an_argument_or_an_option_but_not_both(
    lamina, answers, tiny_text_folder, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["lamina", "generate", str(tiny_text_folder), PROMPT, *GREEDY])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert lamina("generate", PROMPT)[:2] == (0, 2 * (answers["raw"][0] + "\n"))  # printed by each way
    monkeypatch.setattr(sys, "argv", ["lamina", "warmup", "this", "--model", "that"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "MODEL: it is given twice, 'this' and 'that'" in " ".join(capsys.readouterr().err.split())


def test_the_prompt_and_the_answer_are_timed_apart(lamina):
    assert re.search(
        r"6 tokens, first token after [\d.]+ s, then [\d.]+ ms a token", lamina("generate", PROMPT)[2]
    )


def test_sampling_of_every_kind_reaches_the_answer(lamina, answers):
    assert lamina("generate", "--stop", answers["raw"][0][1], PROMPT)[1] == answers["raw"][0][0] + "\n"
    seeded = [lamina("generate", "--temperature", "1", "--seed", "7", PROMPT)[1] for _ in range(2)]
    assert seeded[0] == seeded[1]
    ids = ("--allowed-token-ids", "70", "--ignore-eos", "--json", PROMPT)
    assert json.loads(lamina("generate", *ids)[1])["outputs"][0]["token_ids"] == [70] * 6


def test_a_dash_reads_the_prompt_from_standard_input(lamina, answers):
    assert lamina("generate", "-", stdin=PROMPT)[:2] == (0, answers["raw"][0] + "\n")


def test_chat_applies_the_template_to_the_prompt(lamina, answers):
    assert answers["chat"] != answers["raw"][0]
    assert lamina("generate", "--chat", PROMPT)[:2] == (0, answers["chat"] + "\n")


def test_json_is_one_document_with_texts_and_figures(lamina, answers):
    code, out, _ = lamina("generate", "--json", PROMPT, "th")
    document = json.loads(out)
    assert code == 0
    assert [row["text"] for row in document["outputs"]] == answers["raw"]
    assert document["tokens"] == sum(len(row["token_ids"]) for row in document["outputs"])
    assert document["stats"]["resolved"]["device"]


def test_a_quantization_reaches_the_runtime_and_an_unknown_one_is_one_clear_line(lamina):
    code, out, _ = lamina("generate", "--json", "--quantization", "int8", PROMPT)
    assert (code, json.loads(out)["stats"]["quantization"]["name"]) == (0, "int8")
    code, out, err = lamina("generate", "--quantization", "int3", PROMPT)
    assert (code, out) == (2, "")
    assert "'int3' is not one of" in " ".join(err.split())


def test_several_answers_to_a_prompt_are_printed_each_below_its_own_line(lamina, answers):
    code, out, _ = lamina("generate", "--n", "2", PROMPT)
    heads = [f"=== prompt 1 of 1 answer {number} of 2: {PROMPT}\n" for number in (1, 2)]
    assert (code, out) == (0, "".join(f"{head}{answers['raw'][0]}\n" for head in heads))


def test_a_model_without_a_tokenizer_is_told_before_anything_is_compiled(
    tiny_folder, compile_cache, monkeypatch, capsys
):
    for command in (["generate", str(tiny_folder), PROMPT], ["chat", str(tiny_folder)]):
        monkeypatch.setattr(sys, "argv", ["lamina", *command, "--cache-dir", str(compile_cache / "empty")])
        with pytest.raises(SystemExit, match="2"):
            main()
        err = capsys.readouterr().err
        assert f"{tiny_folder} has no tokenizer" in err
        assert "--tokenizer, in Python tokenizer=" in err
        assert "compiling" not in err


def test_chat_says_its_defaults_where_the_checkpoint_has_none(lamina):
    assert "sampling: temperature 0.0, top_p 0.9" in lamina("chat")[2]
    assert "the checkpoint does not say how" not in lamina("chat", "--top-p", "1")[2]


def test_json_tells_log_probabilities_and_the_index_of_each_answer(lamina):
    code, out, _ = lamina("generate", "--json", "--n", "2", "--logprobs", "1", PROMPT)
    rows = json.loads(out)["outputs"]
    assert (code, [row["index"] for row in rows]) == (0, [0, 1])
    for row in rows:
        assert [entry[0]["token_id"] for entry in row["logprobs"]] == row["token_ids"]
        assert {entry[0]["rank"] for entry in row["logprobs"]} == {1}
        assert all(entry[0]["logprob"] < 0 for entry in row["logprobs"])
        assert all(isinstance(told["decoded_token"], str) for entry in row["logprobs"] for told in entry)


def test_a_folder_that_is_no_model_is_one_clear_line(lamina, tmp_path):
    code, out, err = lamina("generate", "--model", str(tmp_path), PROMPT)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("lamina: ")
    assert str(tmp_path) in err
    assert "Traceback" not in err


def test_a_conversation_ends_with_its_input(lamina, answers):
    code, out, err = lamina("chat", stdin=f"{PROMPT}\n\n")
    assert (code, out) == (0, answers["chat"] + "\n")
    assert "/reset" in err


def test_reset_forgets_and_exit_leaves(lamina, answers):
    code, out, _ = lamina("chat", stdin=f"{PROMPT}\n/reset\n{PROMPT}\n/exit\nnever read\n")
    assert (code, out) == (0, 2 * (answers["chat"] + "\n"))


def test_an_unknown_command_and_a_turn_that_fails_leave_the_conversation_as_it_was(lamina, answers):
    too_long = "hello " * 300
    code, out, err = lamina("chat", stdin=f"/frob\n{too_long}\n{PROMPT}\n")
    assert (code, out) == (0, answers["chat"] + "\n")
    assert "unknown command /frob" in err
    assert "lamina: " in err


def start(*arguments, **options):
    command = [sys.executable, "-m", "lamina", "generate", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    # a shell's background jobs ignore SIGINT, and so would what they start
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_program_with_130_and_no_traceback():
    with start("--model", "any", "-", stdin=subprocess.PIPE) as process:
        process.stdin.write("x" * 2**20)  # more than a pipe holds: returns once it is being read
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # ends the read, should the signal have come between two system calls
        err = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_reader_that_leaves_is_no_error_to_see(tiny_text_folder):
    arguments = ("--model", str(tiny_text_folder), "--no-compile", PROMPT)
    with start(*arguments, stdout=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_ctrl_c_stops_an_answer_between_tokens_and_frees_its_blocks(tiny_text_folder, capsys):
    def interrupted(deltas):
        for count, delta in enumerate(deltas):
            if count == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield delta

    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    with Runtime.from_pretrained(str(tiny_text_folder), compile=False) as runtime:
        streamed = print_stream(interrupted(runtime.stream(PROMPT, params)))
        assert streamed.interrupted
        assert streamed.num_tokens == 2
        assert capsys.readouterr().out == streamed.text + "\n"
        stats = runtime.stats()
    assert stats["requests"]["running"] == 0
    assert stats["blocks"]["used"] == 0
