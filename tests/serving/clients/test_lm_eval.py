"""lm-eval's own client of servers, with the tokenizer that the server has, against the model beside it."""

import shutil

import pytest

from lamina.runtime.runtime import Runtime

from ...lm_eval_tasks import ask, responses, write_tasks

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # the harness and what it stands on warn of each other
]


@pytest.fixture(scope="module")
def evaluated(start_server, tiny_text_folder, tmp_path_factory):
    """Samples of every task, over HTTP and by a runtime in this process, both in float32."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from lamina.runtime.lm_eval_model import RuntimeLM

    class AsOverHttp(RuntimeLM):
        def tok_encode(self, string, **_):  # the harness asks servers for no special tokens
            return super().tok_encode(string, add_special_tokens=False)

    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(tiny_text_folder, folder)
    given = write_tasks(tmp_path_factory.mktemp("tasks")), tmp_path_factory.mktemp("datasets")
    server = start_server(folder=folder, settings={"dtype": "float32"})
    model = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="tiny",
        tokenizer_backend="remote",
        max_length=256,
        batch_size=2,
    )
    with Runtime.from_pretrained(folder, dtype="float32", compile=False) as runtime:
        found = ask(model, *given), ask(AsOverHttp(runtime), *given)
    model.tokenizer.session.close()  # which it never does, and which would be told of whatever test runs then
    server.close()
    return found


@pytest.mark.parametrize("task", ["chosen", "whole"])
def test_likelihoods_over_http_are_those_of_the_model(evaluated, task):
    for own, other in zip(*(responses(results, task) for results in evaluated), strict=True):
        assert own == [pytest.approx(score, abs=1e-4) for score in other]


def test_answers_over_http_are_those_of_the_model(evaluated):
    ours, theirs = (responses(results, "written") for results in evaluated)
    assert ours == theirs
