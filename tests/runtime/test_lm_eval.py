"""lm-eval's own model of transformers is the oracle: the same scores and the same answers from a runtime."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from lamina.cli import app
from lamina.common.errors import RequestError
from lamina.runtime.runtime import Runtime

from ..lm_eval_tasks import BFLOAT16, LIKELIHOODS, TASKS, ask, responses, scores, write_tasks

pytest.importorskip("lm_eval")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # the harness and what it stands on warn of each other
]


@pytest.fixture(scope="module")
def text_folder(make_tiny_folder, bbpe_tokenizer, tmp_path_factory):
    """A model with as many rows as its tokenizer has tokens: rows of padding count in transformers alone."""
    folder, tokenizer = tmp_path_factory.mktemp("exact") / "model", bbpe_tokenizer()
    shutil.copytree(make_tiny_folder(vocab_size=len(tokenizer)), folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder_of_tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def evaluated(folder_of_tasks, text_folder, tmp_path_factory):
    """Samples of every task, by a runtime and by transformers, both in float32."""
    from lm_eval.models.huggingface import HFLM

    from lamina.runtime.lm_eval_model import RuntimeLM

    given = folder_of_tasks, tmp_path_factory.mktemp("datasets")
    theirs = ask(HFLM(pretrained=str(text_folder), dtype="float32", device="cpu", batch_size=1), *given)
    with Runtime.from_pretrained(text_folder, dtype="float32", compile=False) as runtime:
        return ask(RuntimeLM(runtime), *given), theirs


def test_likelihoods_are_those_of_transformers(evaluated):
    ours, theirs = (responses(results, "chosen") for results in evaluated)
    for own, other in zip(ours, theirs, strict=True):
        assert [greedy for _, greedy in own] == [greedy for _, greedy in other]
        assert [score for score, _ in own] == pytest.approx([score for score, _ in other], abs=1e-4)


def test_likelihoods_of_whole_texts_are_those_of_transformers(evaluated):
    ours, theirs = (responses(results, "whole") for results in evaluated)
    assert [score for (score,) in ours] == pytest.approx([score for (score,) in theirs], abs=1e-4)


def test_likelihoods_in_bfloat16_are_those_of_transformers_within_what_it_keeps(
    evaluated, folder_of_tasks, text_folder, tmp_path
):
    from lm_eval.models.huggingface import HFLM

    from lamina.runtime.lm_eval_model import RuntimeLM

    given = folder_of_tasks, tmp_path, LIKELIHOODS
    theirs = ask(HFLM(pretrained=str(text_folder), dtype="bfloat16", device="cpu", batch_size=1), *given)
    with Runtime.from_pretrained(text_folder, dtype="bfloat16", compile=False) as runtime:
        ours = ask(RuntimeLM(runtime), *given)
    for task in LIKELIHOODS:
        found, other, exact = (scores(results, task) for results in (ours, theirs, evaluated[0]))
        assert found == pytest.approx(other, rel=BFLOAT16)
        assert found == pytest.approx(exact, rel=BFLOAT16)
        assert found != pytest.approx(exact, rel=1e-5)  # it is another dtype


def test_answers_are_those_of_transformers_to_the_letter(evaluated):
    ours, theirs = (responses(results, "written") for results in evaluated)
    assert ours == theirs
    assert all("e" not in answer for (answer,) in ours)


def test_results_are_those_of_transformers(evaluated):
    ours, theirs = (results["results"] for results in evaluated)
    for task in TASKS:
        figures = {name: value for name, value in ours[task].items() if isinstance(value, float)}
        assert figures
        assert figures == pytest.approx({name: theirs[task][name] for name in figures}, rel=1e-4)


def test_texts_longer_than_the_context_are_scored_in_windows(text_folder):
    from lm_eval.api.instance import Instance

    from lamina.runtime.lm_eval_model import RuntimeLM

    text = "once upon a time there was " * 30
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    with Runtime.from_pretrained(text_folder, compile=False, max_model_len=32) as runtime:
        (score,) = RuntimeLM(runtime).loglikelihood_rolling([request], disable_tqdm=True)
        assert len(runtime.tokenizer.encode(text)) > 4 * 32
    assert -1e5 < score < 0


def test_a_runtime_without_a_tokenizer_is_refused(tiny_folder):
    from lamina.runtime.lm_eval_model import RuntimeLM

    with (
        Runtime.from_pretrained(tiny_folder, compile=False) as runtime,
        pytest.raises(RequestError, match="no tokenizer"),
    ):
        RuntimeLM(runtime)


def test_the_command_prints_the_table_and_writes_the_samples(folder_of_tasks, text_folder, tmp_path):
    written = tmp_path / "results.json"
    tasks = ["--tasks", "chosen,written", "--include", str(folder_of_tasks), "--output", str(written)]
    result = CliRunner().invoke(app, ["eval", str(text_folder), "--no-compile", *tasks])
    assert result.exit_code == 0, result.output
    assert re.search(r"\|chosen\s*\|", result.stdout)
    assert len(json.loads(written.read_text())["samples"]["chosen"]) == 3


def test_an_unknown_task_is_named_before_anything_is_loaded(folder_of_tasks):
    include = ["--include", str(folder_of_tasks)]
    result = CliRunner().invoke(app, ["eval", "/no/such/model", "--tasks", "chosen,no-such-task", *include])
    assert "no-such-task" in str(result.exception)
