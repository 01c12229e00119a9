"""`lamina eval`: tasks of lm-eval's harness, answered by a model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.errors import ConfigError, UnsupportedError
from . import options

Tasks = Annotated[str, typer.Option(help="Names of tasks or groups of lm-eval, with commas between them.")]
Shots = Annotated[int | None, typer.Option(help="Examples before each question, where not the task's own.")]
Limit = Annotated[
    float | None, typer.Option(help="Only so many documents of each task, or below 1 such a share.")
]
Include = Annotated[
    list[Path] | None, typer.Option(help="A folder with tasks of your own as YAML; may be repeated.")
]
Chat = Annotated[bool, typer.Option("--chat/--raw", help="Put questions through the chat template, or not.")]
Output = Annotated[Path | None, typer.Option(help="Write all results as JSON to this file.")]


@options.spread
def evaluate(
    settings: options.Settings,
    tasks: Tasks,
    model: options.Model = None,
    num_fewshot: Shots = None,
    limit: Limit = None,
    include: Include = None,
    chat: Chat = False,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Ask a model the tasks of lm-eval's harness; prints its table of results.

    Needs pip install 'lamina[eval]'. Tasks read their documents from the hub, or from files of your own.
    """
    harness = _harness()
    manager = harness.tasks.TaskManager(include_path=[str(folder) for folder in include or ()] or None)
    names = _known(manager, tasks)
    with settings.open(model) as runtime:
        from ..runtime.lm_eval_model import RuntimeLM

        results = harness.simple_evaluate(
            model=RuntimeLM(runtime),
            tasks=names,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            task_manager=manager,
            log_samples=output is not None,
        )
    if output is not None:
        output.write_text(_as_text(results) + "\n")
    print(_as_text(results["results"]) if as_json else harness.utils.make_table(results))


def _harness() -> Any:
    try:
        import lm_eval
        import lm_eval.tasks
        import lm_eval.utils
    except ImportError as error:
        raise UnsupportedError(f"{error}; lamina eval needs pip install 'lamina[eval]'") from error
    return lm_eval


def _known(manager: Any, tasks: str) -> list[str]:
    """The names of tasks; ConfigError for one that lm-eval does not have."""
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        got = unknown[0] if unknown else tasks
        raise ConfigError(
            f"--tasks is {got!r}; wanted tasks of `lm-eval ls tasks`, or of an --include folder"
        )
    return names


def _as_text(results: Any) -> str:
    """Results as JSON; what JSON has not is written as Python does."""
    return json.dumps(results, indent=2, default=str)
