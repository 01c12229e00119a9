"""Forms that are made to hold a server up: what each takes of CPU time, and how long another thread waits.

The other thread asks for the interpreter every millisecond, as the loop does that writes streams; where more
computes on the machine, its longest wait is due to that as well.
"""

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

from schema_tokenizers import smollm2
from schemas import MODEL, ROOT

from lamina.cli.info import describe_machine
from lamina.common.errors import RequestError
from lamina.runtime.structured_output.compiler import GrammarCompiler
from lamina.runtime.structured_output.grammar import grammar_of
from lamina.runtime.structured_outputs import StructuredOutputs

RESULTS = ROOT / "benchmarks" / "results" / "hostile_forms.json"
TEXT = {"type": "string"}


def nested(schema: Any, depth: int, around: Any) -> Any:
    """Returns a schema in so many others."""
    for _ in range(depth):
        schema = around(schema)
    return schema


def linked(num: int, around: Any) -> dict[str, Any]:
    """Returns a schema of so many references in a row."""
    links = {f"d{number}": around({"$ref": f"#/$defs/d{number + 1}"}) for number in range(num)}
    return {"$defs": {**links, f"d{num}": TEXT}, "$ref": "#/$defs/d0"}


def an_object(inner: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": inner}}


FORMS: dict[str, dict[str, Any]] = {
    "repetitions of repetitions": {"regex": "((a{1,100}){1,100}){1,100}"},
    "an open class": {"regex": "[unclosed"},
    "a lookahead": {"regex": "(?=x)a"},
    "backtracking": {"regex": "(a+)+b"},
    "20,000 optional characters": {"regex": "a?" * 20_000},
    "letters of all scripts": {"json": {**TEXT, "pattern": r"^(\p{L}{1,50} ?){1,50}$"}},
    "200,000 open classes": {"json": {**TEXT, "pattern": "[" * 200_000}},
    "50,000 classes": {"json": {**TEXT, "pattern": "[^a]" * 50_000}},
    "pattern and maxLength": {"json": {**TEXT, "pattern": "^[a-z]+$", "maxLength": 3}},
    "maxLength of a million": {"json": {**TEXT, "maxLength": 1_000_000}},
    "a type that is none": {"json": {"type": "hiccup"}},
    "a reference to nowhere": {"json": {"$ref": "#/nowhere"}},
    "a reference to itself": {"json": {"$ref": "#"}},
    "8,000 references": {"json": linked(8000, lambda ref: ref)},
    "6,000 references in objects": {"json": linked(6000, an_object)},
    "3,000 lists in lists": {"json": '{"items":' * 3000 + "{}" + "}" * 3000},
    "oneOf of 4, 6 deep": {"json": nested(an_object(TEXT), 6, lambda each: {"oneOf": [each] * 4})},
    "oneOf of 3,000": {
        "json": {"oneOf": [{**an_object({"const": n}), "required": ["a"]} for n in range(3000)]}
    },
    "oneOf of itself": {
        "json": {
            "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 30}},
            "oneOf": [{"$ref": "#/$defs/A"}, TEXT],
        }
    },
    "20,000 values": {"json": {"enum": [f"value {n}" for n in range(20_000)]}},
    "20,000 lists as values": {"json": {"enum": [[n] for n in range(20_000)]}},
    "20,000 properties": {"json": {"type": "object", "properties": {f"p{n}": TEXT for n in range(20_000)}}},
    "2,000 patterns of names": {"json": {"patternProperties": {f"^x{n}-": TEXT for n in range(2000)}}},
    "10,000 choices": {"choice": [f"choice number {n}" for n in range(10_000)]},
    "20,000 rules": {
        "grammar": "\n".join(["start: r0", *(f'r{n}: "x" r{n + 1}' for n in range(20_000)), 'r20000: "b"'])
    },
    "5,000 brackets": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
}


class Other(threading.Thread):
    """A thread that asks for the interpreter again and again, and knows how long it waited at most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest, self.is_over = 0.0, False

    def run(self) -> None:
        while not self.is_over:
            before = time.perf_counter()
            time.sleep(0.001)
            self.longest = max(self.longest, time.perf_counter() - before - 0.001)


def outcome(compiler: GrammarCompiler, form: dict[str, Any]) -> dict[str, Any]:
    """Returns what came of a form, its CPU time, and the longest wait of another thread."""
    other = Other()
    other.start()
    start, said = time.process_time(), "compiled"
    try:
        compiler.matcher(grammar_of(StructuredOutputs(**form)))
    except RequestError as error:
        said = str(error).partition("\n")[0][:120]
    seconds = time.process_time() - start
    other.is_over = True
    other.join()
    return {
        "answer": said,
        "cpu_ms": round(seconds * 1e3, 1),
        "other_waited_ms": round(other.longest * 1e3, 1),
    }


def main() -> None:
    """Print what came of each form, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a GGUF file, for its tokenizer")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    tokenizer = smollm2(options.model, options.model.parent)
    compiler = GrammarCompiler(
        tokenizer.tokenizer.to_str, num_valid_ids=tokenizer.size, eos_token_ids=[tokenizer.eos]
    )
    compiler.compiled('start: "a"')
    machine = {name: describe_machine()[name] for name in ("cpu", "cores", "python", "versions")}
    found = {name: outcome(compiler, form) for name, form in FORMS.items()}
    for name, result in found.items():
        print(f"{name:30}{result['cpu_ms']:9} ms{result['other_waited_ms']:9} ms  {result['answer']}")
    options.output.write_text(json.dumps({"machine": machine, "forms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
