"""Tasks of lm-eval's harness that need no hub, and what a model answers to them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIKELIHOODS = ("chosen", "whole")
BFLOAT16 = 2**-6  # of a score: bfloat16 keeps eight bits of what it is the sum of
QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " a kind of fish", " seven"], "answer": 0},
    {"question": "One and one are", "choices": [" two", " three or so", " none"], "answer": 0},
    {"question": "Cats", "choices": [" purr", " fly", " are numbers"], "answer": 0},
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


def write_tasks(folder: Path) -> Path:
    """The same folder, with every task and the documents that they ask."""
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, text in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/documents.jsonl}}}}"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}\ntest_split: test\n{text}")
    return folder


def ask(model: Any, folder: Path, cache: Path, tasks: Sequence[str] = tuple(TASKS)) -> dict[str, Any]:
    """Results of these tasks, by a model of the harness."""
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    datasets.config.HF_DATASETS_CACHE = cache
    manager = TaskManager(include_path=[str(folder)])
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model, tasks=[*tasks], task_manager=manager, bootstrap_iters=0
    )
    return results


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """What was answered to each document, in their order."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def scores(results: dict[str, Any], task: str) -> list[float]:
    """The likelihood of every text that the task asks for."""
    found = [each for answers in responses(results, task) for each in answers]
    return [each[0] if isinstance(each, tuple) else each for each in found]
