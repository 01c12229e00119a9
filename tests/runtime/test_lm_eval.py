"""lm-eval's own model of transformers is the oracle: the same scores and the same answers from a runtime."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from lamina.cli import app
from lamina.common.errors import RequestError
from lamina.runtime.runtime import Runtime

pytest.importorskip("lm_eval")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # the harness and what it stands on warn of each other
]
QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " a kind of fish", " seven"], "answer": 0},
    {"question": "One and one are", "choices": [" two", " three or so", " none"], "answer": 0},
    {"question": "Cats", "choices": [" purr", " fly", " are numbers"], "answer": 0},
    {"question": "", "choices": [" begin", " end"], "answer": 1},
]
TASKS = {
    "chosen": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{question}}?"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def text_folder(make_tiny_folder, bbpe_tokenizer, tmp_path_factory):
    """A model with as many rows as its tokenizer has tokens: rows of padding count in transformers alone."""
    folder, tokenizer = tmp_path_factory.mktemp("exact") / "model", bbpe_tokenizer()
    shutil.copytree(make_tiny_folder(vocab_size=len(tokenizer)), folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder_of_tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS[:3])))
    for name, text in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/documents.jsonl}}}}"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}\ntest_split: test\n{text}")
    return folder


@pytest.fixture(scope="module")
def evaluated(folder_of_tasks, text_folder, tmp_path_factory):
    """Samples of every task, by a runtime and by transformers, both in float32."""
    import datasets
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from lamina.runtime.lm_eval_model import RuntimeLM

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")

    def ask(model):
        manager = TaskManager(include_path=[str(folder_of_tasks)])
        given = {"tasks": [*TASKS], "task_manager": manager, "bootstrap_iters": 0}
        return lm_eval.simple_evaluate(model=model, **given)

    theirs = ask(HFLM(pretrained=str(text_folder), dtype="float32", device="cpu", batch_size=1))
    with Runtime.from_pretrained(text_folder, dtype="float32", compile=False) as runtime:
        return ask(RuntimeLM(runtime)), theirs


def responses(results, task):
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def test_likelihoods_are_those_of_transformers(evaluated):
    ours, theirs = (responses(results, "chosen") for results in evaluated)
    for own, other in zip(ours, theirs, strict=True):
        assert [greedy for _, greedy in own] == [greedy for _, greedy in other]
        assert [score for score, _ in own] == pytest.approx([score for score, _ in other], abs=1e-4)


def test_likelihoods_of_whole_texts_are_those_of_transformers(evaluated):
    ours, theirs = (responses(results, "whole") for results in evaluated)
    assert [score for (score,) in ours] == pytest.approx([score for (score,) in theirs], abs=1e-4)


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
