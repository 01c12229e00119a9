"""The dashboard in examples/monitoring asks for figures and labels that /metrics has."""

import json
import re
from pathlib import Path

import pytest

from lamina.serving.metrics.families import (
    FAMILIES,
    PREFIX,
    PROCESS_FAMILIES,
    SERVER_FAMILIES,
    SWAP_FAMILIES,
)

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "lamina.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
LABELS = {
    PREFIX + family.name + suffix: {"model_name", "le", *family.labels}
    for family in FAMILIES
    for suffix in SUFFIXES[family.kind]
}
# What dashboards made for vLLM ask for, less its prefix.
OF_VLLM = (
    *(
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
    ),
    *(
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
    ),
    *(
        "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum",
    ),
    *("request_inference_time_seconds_bucket", "request_success_total", "request_prompt_tokens_bucket"),
    *("request_generation_tokens_bucket", "request_params_max_tokens_bucket", "request_params_n_bucket"),
    *(
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "iteration_tokens_total_bucket",
    ),
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_names_figures_and_labels_that_exist(expression):
    names = re.findall(r"lamina:\w+", expression)
    assert names
    assert set(names) <= LABELS.keys()
    for by in re.findall(r"by \(([^)]*)\)", expression):
        assert {label.strip() for label in by.split(",")} <= set.union(*(LABELS[name] for name in names))
    assert expression.count("(") == expression.count(")")
    assert expression.count('{model_name=~"$model"}') == len(names)


@pytest.mark.parametrize("family", [*SERVER_FAMILIES, *PROCESS_FAMILIES], ids=lambda family: family.name)
def test_legends_are_of_labels_that_exist(family):
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            if PREFIX + family.name in target["expr"]:
                assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(family.labels)


@pytest.mark.parametrize("family", SWAP_FAMILIES, ids=lambda family: family.name)
def test_how_models_take_turns_is_shown_of_each(family):
    shown = [expression for expression in EXPRESSIONS if PREFIX + family.name in expression]
    assert shown
    assert all("model_name)" in expression.partition(" (lamina")[0] for expression in shown)


def test_panels_have_places_and_ids_of_their_own():
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("name", OF_VLLM)
def test_what_dashboards_for_vllm_ask_for_is_there(name):
    assert PREFIX + name in LABELS
