"""Forms on a GPU: samples that are launched late, with masks by threads or without, are those at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import CompileConfig, Runtime, SamplingParams, StructuredOutputs
from lamina.runtime.worker import grammar_masks
from lamina.runtime.worker.deferred_step import Choice
from lamina.runtime.worker.mask_thread import CheaperWay, MaskThread

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutputs(json={"type": "array", "items": PERSON, "minItems": 9}),
    StructuredOutputs(regex="[a-z ]{40}"),
    StructuredOutputs(regex="[ab]{9}once upon a time, the end[cd]{9}"),
    StructuredOutputs(json={"type": "array", "uniqueItems": True, "items": {"enum": ["one", "only", 1, 12]}}),
]
PARAMS = [
    SamplingParams(
        temperature=float(row % 3 > 0),
        seed=row,
        max_tokens=60 - row,
        structured_outputs=None if row % 5 == 4 else FORMS[row % len(FORMS)],
        presence_penalty=float(row % 7 == 6),
    )
    for row in range(24)
]
PROMPTS = [f"Once upon a time {row}" for row in range(24)]


@pytest.fixture(scope="module", params=["auto", "off"], ids=["captured", "eager"])
def runtime(
    tiny_text_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Runtime]:
    settings: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 256, "num_kv_blocks": 600}
    with (
        pytest.MonkeyPatch.context() as patch,
        Runtime.from_pretrained(
            tiny_text_folder,
            cache_dir=tmp_path_factory.mktemp("cache"),
            compile=CompileConfig(cuda_graphs=request.param),
            device="cuda",
            **settings,
        ) as runtime,
    ):
        patch.setattr(grammar_masks, "WORTH_A_THREAD", -1)
        patch.setattr(grammar_masks, "ROWS_OF_A_LEXER", 2)
        yield runtime


@pytest.mark.parametrize("is_thread", [True, False], ids=["beside", "by who steps"])
def test_samples_that_wait_for_masks_are_those_that_are_chosen_at_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, is_thread: bool
) -> None:
    def tokens() -> list[Any]:
        return [answer.outputs[0].token_ids for answer in runtime.generate(PROMPTS, PARAMS)]

    tokens()  # all prompts are in the prefix cache then, so that steps have the same rows
    with monkeypatch.context() as patch:
        patch.setattr(Choice, "waits_for_masks_alone", property(lambda choice: False))
        patch.setattr(CheaperWay, "is_thread", lambda way: False)
        wanted = tokens()
    started: list[Any] = []
    start = MaskThread.start
    monkeypatch.setattr(MaskThread, "start", lambda thread, job: (started.append(job), start(thread, job)))
    monkeypatch.setattr(CheaperWay, "is_thread", lambda way: is_thread)
    for _ in range(3):
        assert tokens() == wanted
    assert bool(started) == is_thread
