"""lm-eval's own client of servers, with the tokenizer that the server has, against the model beside it."""

import shutil

import pytest

from lamina.runtime.runtime import Runtime

from ...lm_eval_tasks import BFLOAT16, LIKELIHOODS, TASKS, ask, responses, scores, write_tasks

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # the harness and what it stands on warn of each other
]


@pytest.fixture(scope="module")
def evaluate(start_server, tiny_text_folder, tmp_path_factory):
    """evaluate(dtype, tasks) -> samples of tasks over HTTP, and by a runtime in this process."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from lamina.runtime.lm_eval_model import RuntimeLM

    class AsOverHttp(RuntimeLM):
        def tok_encode(self, string, **_):  # the harness asks servers for no special tokens
            return super().tok_encode(string, add_special_tokens=False)

    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(tiny_text_folder, folder)
    paths = write_tasks(tmp_path_factory.mktemp("tasks")), tmp_path_factory.mktemp("datasets")

    def evaluated(dtype, tasks):
        server = start_server(folder=folder, settings={"dtype": dtype})
        model = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model="tiny",
            tokenizer_backend="remote",
            max_length=256,
            batch_size=2,
        )
        with Runtime.from_pretrained(folder, dtype=dtype, compile=False) as runtime:
            found = ask(model, *paths, tasks), ask(AsOverHttp(runtime), *paths, tasks)
        model.tokenizer.session.close()  # which it never does, and which would be told of in any later test
        server.close()
        return found

    return evaluated


def test_likelihoods_and_answers_over_http_are_those_of_the_model(evaluate):
    over_http, beside = evaluate("float32", tuple(TASKS))
    for task in LIKELIHOODS:
        assert scores(over_http, task) == pytest.approx(scores(beside, task), abs=1e-4)
        greedy = [[each[1:] for each in answers] for answers in responses(over_http, "chosen")]
        assert greedy == [[each[1:] for each in answers] for answers in responses(beside, "chosen")]
    assert responses(over_http, "written") == responses(beside, "written")


def test_likelihoods_in_bfloat16_are_those_of_the_model_within_what_it_keeps(evaluate):
    over_http, beside = evaluate("bfloat16", LIKELIHOODS)
    for task in LIKELIHOODS:
        assert scores(over_http, task) == pytest.approx(scores(beside, task), rel=BFLOAT16)
