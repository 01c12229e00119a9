"""Structured outputs held to schemas that people wrote: what is accepted, what is refused, and what it costs.

Each schema is compiled as a request's is. Instances, valid and not by jsonschema, are read token by token;
answers are drawn from the masks at random, and jsonschema says of each whether it is an instance.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from schema_corpus import FAMILIES, Schema, sampled, validator_of
from schema_instances import instances
from schema_tokenizers import TOKENIZERS, Vocabulary

from lamina.cli.info import describe_machine
from lamina.common.errors import RequestError
from lamina.runtime.structured_output.compiler import GrammarCompiler
from lamina.runtime.structured_output.grammar import grammar_of
from lamina.runtime.structured_outputs import StructuredOutputs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "schemas.json"
MODEL = ROOT / "cache_dir" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
LONGEST = 400  # tokens of an answer that is drawn
CLOSING = ('"', '"}', "}", "]", '"]', "}}", '",')


class Walker:
    """Reads texts by the compiled grammar of a schema, and keeps what each mask took of CPU time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiler = GrammarCompiler(
            lambda: vocabulary.tokenizer.to_str(),
            num_valid_ids=vocabulary.size,
            eos_token_ids=[vocabulary.eos],
        )
        self._compiler.compiled('start: "a"')  # the tokenizer's own preparation
        self.mask_us: list[float] = []
        closing = [vocabulary.eos, *(vocabulary.tokenizer.token_to_id(text) for text in CLOSING)]
        self._closing = np.array([id_ for id_ in closing if id_ is not None])
        self._mask = np.zeros((vocabulary.size + 31) // 32, np.int32)

    def compile(self, schema: dict[str, Any], *, compact: bool = False) -> tuple[Any, float]:
        """Returns the grammar's matcher and the milliseconds of CPU time up to the first mask."""
        start = time.process_time()
        matcher = self._compiler.matcher(grammar_of(StructuredOutputs(json=schema, compact=compact)))
        self._fill(matcher)
        return matcher, (time.process_time() - start) * 1e3

    def accepts(self, matcher: Any, text: str) -> bool:
        """Whether every token of a text is in the mask of its place, and the end is at its end."""
        matcher = matcher.deep_copy()
        for token_id in self._vocabulary.encode(text):
            mask = self._timed(matcher)
            if not mask[token_id // 32] >> (token_id % 32) & 1:
                return False
            matcher.consume_token(token_id)
        return bool(matcher.is_accepting())

    def drawn(self, matcher: Any, rng: random.Random) -> str | None:
        """Returns an answer of tokens drawn from the masks, most of them short; None where it has no end."""
        matcher = matcher.deep_copy()
        token_ids: list[int] = []
        while len(token_ids) < LONGEST:
            bits = np.unpackbits(self._timed(matcher).view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            closing = self._closing[bits[self._closing] > 0]
            soon = len(closing) and rng.random() < (0.6 if len(token_ids) < LONGEST // 2 else 0.95)
            token_id = int(rng.choice(closing if soon else allowed))
            if token_id == self._vocabulary.eos:
                break
            matcher.consume_token(token_id)
            token_ids.append(token_id)
            if matcher.is_stopped():
                break
        else:
            return None
        return self._vocabulary.decode(token_ids)

    def _timed(self, matcher: Any) -> Any:
        start = time.thread_time_ns()
        self._fill(matcher)
        self.mask_us.append((time.thread_time_ns() - start) / 1e3)
        return self._mask

    def _fill(self, matcher: Any) -> None:
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What came of one schema."""

    family: str
    name: str
    refused: str = ""  # by what, where it was not compiled
    compile_ms: float = 0.0
    num_valid: int = 0
    num_invalid: int = 0
    num_drawn: int = 0
    valid_refused: list[str] = field(default_factory=list)
    invalid_accepted: list[str] = field(default_factory=list)
    invalid_drawn: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return not (self.refused or self.valid_refused or self.invalid_accepted or self.invalid_drawn)


def outcome(one: Schema, walker: Walker, count: int) -> Outcome:
    """Returns what comes of a schema and so many of its instances."""
    found = Outcome(family=one.family, name=one.name)
    try:
        matcher, found.compile_ms = walker.compile(one.schema)
    except RequestError as error:
        found.refused = str(error)
        return found
    valid, invalid = instances(one.schema, one.name, count)
    found.num_valid, found.num_invalid = len(valid), len(invalid)
    texts = [json.dumps(value, ensure_ascii=False) for value in valid]
    found.valid_refused = [text for text in texts if not walker.accepts(matcher, text)]
    texts = [json.dumps(value, ensure_ascii=False) for value in invalid]
    found.invalid_accepted = [text for text in texts if walker.accepts(matcher, text)]
    validator, rng = validator_of(one.schema), random.Random(one.name)
    compact, _ = walker.compile(one.schema, compact=True)
    for _ in range(count):
        text = walker.drawn(compact, rng)
        if text is not None:
            found.num_drawn += 1
            if not _is_instance(validator, text):
                found.invalid_drawn.append(text)
    return found


def _is_instance(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Returns counts of schemas, instances and answers."""
    return {
        "schemas": len(outcomes),
        "refused": sum(bool(one.refused) for one in outcomes),
        "right": sum(one.is_right for one in outcomes),
        "valid": sum(one.num_valid for one in outcomes),
        "valid_refused": sum(len(one.valid_refused) for one in outcomes),
        "invalid": sum(one.num_invalid for one in outcomes),
        "invalid_accepted": sum(len(one.invalid_accepted) for one in outcomes),
        "drawn": sum(one.num_drawn for one in outcomes),
        "invalid_drawn": sum(len(one.invalid_drawn) for one in outcomes),
    }


def figures(values: list[float]) -> dict[str, float]:
    """Returns the median, the 99th of a hundred, and the largest."""
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p99": round(ordered[int(len(ordered) * 0.99)], 3),
        "max": round(ordered[-1], 3),
    }


def main() -> None:
    """Print what came of each family, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-family", type=int, default=150)
    parser.add_argument("--instances", type=int, default=8, help="of each kind, of each schema")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=ROOT / "cache_dir" / "outside")
    parser.add_argument("--model", type=Path, default=MODEL, help="a GGUF file, for its tokenizer")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, nargs="*", default=list(TOKENIZERS))
    parser.add_argument("--wrong", type=Path, help="a file for what is not right")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    every = sampled(options.cache, options.per_family, options.seed)
    machine = {name: describe_machine()[name] for name in ("cpu", "cores", "python", "versions")}
    document: dict[str, Any] = {"machine": machine, "seed": options.seed, "tokenizers": {}}
    for name in options.tokenizer:
        walker = Walker(TOKENIZERS[name](options.model, options.cache))
        outcomes = [outcome(one, walker, options.instances) for one in every]
        if options.wrong:
            wrong = [asdict(one) for one in outcomes if not one.is_right]
            options.wrong.write_text(json.dumps(wrong, indent=1, ensure_ascii=False))
        compiled = [one.compile_ms for one in outcomes if not one.refused]
        document["tokenizers"][name] = {
            **{family: summary([one for one in outcomes if one.family == family]) for family in FAMILIES},
            "all": summary(outcomes),
            "refused_for": Counter(reason(one.refused) for one in outcomes if one.refused).most_common(),
            "compile_and_first_mask_ms": figures(compiled),
            "mask_us": {"masks": len(walker.mask_us), **figures(walker.mask_us)},
        }
        print(json.dumps(document["tokenizers"][name], indent=1))
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def reason(refused: str) -> str:
    """Returns what a refusal is for, without what differs from schema to schema."""
    text = refused.removeprefix("structured_outputs cannot be enforced: ").partition("\n")[0]
    return text.partition("'http")[0].partition(": http")[0].partition(": json-schema")[0][:80]


if __name__ == "__main__":
    main()
