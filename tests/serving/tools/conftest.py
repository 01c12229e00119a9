"""A server of a TINY model whose chat template offers tools, and marks reasoning where that is asked."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

BODY = (
    "{{ bos_token }}"
    "{% for tool in tools or [] %}{{ tool.function.name }} in <tool_call></tool_call>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKING = (
    BODY + "{% if enable_thinking | default(true) %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="session")
def make_chat_folder(
    make_tiny_folder: Callable[..., Path], tiny_text_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """make_chat_folder(template) -> folder of a TINY model with room for 1024 tokens and that template."""

    def make(template: str) -> Path:
        folder = tmp_path_factory.mktemp("tiny-chat") / "model"
        shutil.copytree(make_tiny_folder(max_position_embeddings=1024), folder)
        for path in tiny_text_folder.iterdir():
            if not (folder / path.name).exists():
                shutil.copy(path, folder)
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


@pytest.fixture(scope="session")
def tool_client(start_server: Callable[..., Any], make_chat_folder: Callable[[str], Path]) -> httpx.Client:
    """A client of a server whose model writes calls as Hermes does."""
    return start_server(folder=make_chat_folder(BODY)).client


@pytest.fixture(scope="session")
def thinking_client(
    start_server: Callable[..., Any], make_chat_folder: Callable[[str], Path]
) -> httpx.Client:
    """A client of a server whose template begins the reasoning, unless enable_thinking is false."""
    return start_server(folder=make_chat_folder(THINKING)).client
