"""Fields that are known and would change the answer, but are not served: refused by name."""

from collections.abc import Mapping
from typing import Any

from .decoding import Unserved

ONE_ENGINE = "forms of answers are enforced in one way; leave it out"
NO_TOOLS = Unserved(why="tools are written into prompts by chats alone; leave it out", neutral=([],))
OLDER_TOOLS = "name them with tools and tool_choice"
TEXT_ALONE = "this server reads and writes text alone; leave it out"
NO_BEAMS = "a beam search is not served over HTTP; leave it out"
NO_CODE = "the server runs no code of a request; leave it out"


def _all(why: str, *names: str, neutral: tuple[Any, ...] = ()) -> dict[str, Unserved]:
    return {name: Unserved(why=why, neutral=neutral) for name in names}


GENERATION: Mapping[str, Unserved] = {
    **_all(ONE_ENGINE, "guided_decoding_backend", "guided_whitespace_pattern"),
    **_all("name it with structured_outputs", "grammar", "json_schema", "regex", "ebnf"),
    **_all(NO_BEAMS, "use_beam_search", "early_stopping", neutral=(False,)),
    **_all(NO_BEAMS, "length_penalty", neutral=(1, 1.0)),
    **_all(NO_BEAMS, "beam_width", "num_beams"),
    **_all(NO_CODE, "logits_processors", "logit_processors", neutral=([],)),
    **_all(TEXT_ALONE, "mm_processor_kwargs", "prompt_embeds", neutral=({}, [])),
    **_all("name a loaded adapter with model; leave it out", "lora_path", "lora_request"),
    **_all("there is no such choice; leave it out", "spaces_between_special_tokens", neutral=(True,)),
    **_all("name them with max_tokens", "max_new_tokens", "n_predict", "max_length"),
    **_all("name it with repetition_penalty", "repeat_penalty"),
    **_all("name it with min_tokens", "min_new_tokens"),
    **_all("name them with stop", "stop_sequences", "stop_strings"),
    **_all("set temperature to 0 for false, and above 0 for true", "do_sample"),
    **_all("there is no such sampler; leave it out", "mirostat", "dry_multiplier", "xtc_probability"),
    **_all("there is no such sampler; leave it out", "samplers", "custom_logit_processor", "stop_regex"),
    **_all("caches are not moved between servers; leave it out", "kv_transfer_params"),
}

COMPLETIONS: Mapping[str, Unserved] = {
    **GENERATION,
    **_all("name it with logprobs", "top_logprobs"),
    **_all("nothing is written between two texts; leave it out", "suffix", neutral=("",)),
}

CHAT: Mapping[str, Unserved] = {
    **GENERATION,
    **_all(OLDER_TOOLS, "functions"),
    **_all(OLDER_TOOLS, "function_call", neutral=("none",)),
    **_all(TEXT_ALONE, "modalities", neutral=(["text"],)),
    **_all(TEXT_ALONE, "audio"),
    **_all("no web is searched; leave it out", "web_search_options"),
    **_all("nothing is predicted; leave it out", "prediction"),
    **_all("ask for it in the prompt", "verbosity", neutral=("medium",)),
    **_all("reasoning is not counted apart; leave it out", "thinking_token_budget"),
    **_all("give chat_template_kwargs", "documents", neutral=([],)),
    **_all("the prompt of a chat is not given back; use /v1/completions", "echo", neutral=(False,)),
    **_all(
        "chat templates write special tokens themselves; leave it out", "add_special_tokens", neutral=(False,)
    ),
}

RESPONSES: Mapping[str, Unserved] = {
    **CHAT,
    **_all("calls are not counted; leave it out", "max_tool_calls"),
    **_all("reasoning is told as items; leave it out", "include_reasoning", neutral=(True,)),
    **_all("responses are written while their client waits; leave it out", "background", neutral=(False,)),
    **_all("responses are written while their client waits; leave it out", "background_options"),
    **_all("name a stored response with previous_response_id", "conversation"),
    **_all("the text alone is told; leave it out", "include", neutral=([],)),
    **_all("the text alone is told; leave it out", "top_logprobs", neutral=(0,)),
    **_all("no prompts are kept; give instructions and input", "prompt"),
    **_all("what does not fit is refused; leave it out", "truncation", neutral=("disabled",)),
    **_all("what does not fit is refused; leave it out", "context_management", neutral=([],)),
    **_all("nothing is moderated; leave it out", "moderation"),
    **_all(TEXT_ALONE, "image"),
    **_all("name it with max_output_tokens", "max_tokens", "max_completion_tokens"),
    **_all("name it with max_output_tokens", "max_new_tokens", "n_predict", "max_length"),
    **_all("name it with input", "messages"),
    **_all("name it with text.format", "response_format"),
    **_all("name it with reasoning.effort", "reasoning_effort"),
    **_all("one answer is written; leave it out, or use /v1/chat/completions", "n", neutral=(1,)),
}

RESPONSE_TEXT: Mapping[str, Unserved] = _all("ask for it in the prompt", "verbosity", neutral=("medium",))
REASONING: Mapping[str, Unserved] = _all(
    "reasoning stays in the text; leave it out", "summary", "generate_summary"
)

MESSAGE: Mapping[str, Unserved] = {
    **_all("name it with tool_calls", "function_call"),
    **_all(TEXT_ALONE, "audio"),
}

ACCEPTED = frozenset(  # they change no answer
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options"),
    )
)
CHAT_ACCEPTED = ACCEPTED | {"prompt_cache_retention"}
