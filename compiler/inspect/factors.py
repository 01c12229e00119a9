"""What a plan could depend on, and what becomes of each: the table of docs/warm_start.md."""

from collections.abc import Iterator

from ..capture.capture import QUESTIONS, REFUSED
from ..torch_internals.torch_section import FREE, NEUTRALIZED, STEERED

# What each factor of a key that is known before a trace is, by the name that a miss gives it.
KEYED = {
    "program": "the name of the model's callable",
    "model": "what the caller adds, by name",
    "parameters": "name, shape and dtype of every weight",
    "sources": "the text of Lamina's compiler, and of what a trace goes through in its ops",
    "passes": "name and version of each pass; of one's own its code, and what that closes over or names",
    "numerics": "fast or exact",
    "tokens": "the hint and the largest number of tokens",
    "settings": "Lamina's settings of Inductor",
    "toolchain": "torch, Python and instruction set, or CUDA, Triton and the GPU's capability",
}
READ_AS = {
    "value({0})": "a constant, function, class or module that was read: a function by its code, with its "
    "defaults, what it closes over and the globals that it names",
    "type({0})": "the class of an object that was read, with its methods, and the names of its attributes",
    "length({0})": "how long a sequence was; of a dict or set its keys",
    "keys({0})": "the keys of a dict",
    "contains({0}, {key!r})": "whether a key was there",
    "has({0}, {attr!r})": "whether an attribute was there",
    "same({0}, {source_b})": "whether two names led to one object",
    "own({0}, {attr!r})": "whether an object itself had it",
}


def rows() -> Iterator[tuple[str, str]]:
    """Each factor with what becomes of it: keyed, re-checked, neutralized or refused."""
    for name, what in KEYED.items():
        yield f"`{name}`: {what}", "keyed"
    for form in QUESTIONS:
        yield f"`{form.format('x', key='k', attr='a', source_b='y')}`: {READ_AS[form]}", "re-checked"
    for what in NEUTRALIZED:
        yield what, "neutralized"
    yield f"settings of {', '.join(STEERED)}, but for {', '.join(sorted(FREE))}", "neutralized"
    for what in REFUSED:
        yield what, "refused"


def table() -> str:
    """The rows as Markdown."""
    lines = [f"| {what} | {becomes} |" for what, becomes in rows()]
    return "\n".join(["| factor | becomes |", "|---|---|", *lines]) + "\n"
