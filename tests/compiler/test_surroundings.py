"""Whatever a program reads of its surroundings, a plan is never used where it would be wrong."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.common.store import Store
from lamina.compiler import cache
from lamina.compiler.capture.readings import ask

from .interpreted import Interpreter, compile_world
from .tally import PROVED
from .worlds import FREE, LINES, OF_EVERY_LINE, World, parts_of

# Each example is ten surroundings: `make prove`, with its thousand examples, goes through 10,000.
EXAMPLES = settings().max_examples if settings().max_examples > 20 else 4
NUM_TURNS = 10
CHANGEABLE = [*dict.fromkeys(part for line in LINES for part in parts_of(line)), "pass", *FREE]


@st.composite
def worlds_in_turn(draw):
    """A world, and the nine worlds that it becomes, one part changed at a time."""
    lines = draw(st.lists(st.sampled_from(list(LINES)), min_size=1, max_size=5, unique=True))
    world = World(lines=tuple(lines))
    read = [part for line in lines for part in parts_of(line)]
    turns = [world]
    for _ in range(NUM_TURNS - 1):
        part = draw(st.sampled_from(CHANGEABLE) | st.sampled_from(read or CHANGEABLE))
        world = world.changed(part, draw(st.integers(1, 3)))
        turns.append(world)
    return turns


@given(turns=worlds_in_turn())
@settings(max_examples=EXAMPLES)
def test_every_plan_is_of_the_world_it_is_used_in_and_none_is_made_twice(turns, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        Interpreter(monkeypatch)
        seen = set()
        for world in turns:
            outcome = compile_world(world, store)
            assert outcome.is_right, world
            assert outcome.was_captured == (world.relevant not in seen), world
            seen.add(world.relevant)
            PROVED["surroundings"] += 1


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A store that holds the plan of a world that reads everything."""
    store = Store(tmp_path_factory.mktemp("store"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        interpreter = Interpreter(monkeypatch)
        world = World(lines=tuple(LINES))
        assert compile_world(world, store).was_captured
        yield store, world, interpreter


def test_a_miss_names_what_was_read_and_differs(everything):
    store, world, _ = everything
    for part, name in {
        "held": "THING.held",
        "nested": "rope.theta",
        "variable": "environ",
        "item": "TABLE",
    }.items():
        miss = compile_world(world.changed(part, 3), store).compiled.miss
        assert name in miss


READ = [part for part in CHANGEABLE if part not in FREE]


@pytest.mark.parametrize("part", READ)
def test_each_part_that_is_read_makes_a_new_plan_that_names_it(everything, part):
    store, world, _ = everything
    outcome = compile_world(world.changed(part, 2), store)
    assert outcome.is_right
    assert outcome.was_captured
    assert re.search(r"differs in (read|passes)", outcome.compiled.miss), outcome.compiled.miss


@pytest.mark.parametrize("part", FREE)
def test_what_is_not_read_or_is_neutralized_makes_none(everything, part):
    store, world, _ = everything
    outcome = compile_world(world.changed(part, 2), store)
    assert outcome.is_right
    assert not outcome.was_captured


@pytest.mark.parametrize("line", LINES)
def test_a_line_makes_no_new_plan_whatever_else_changes(everything, line):
    store, _, _ = everything
    world = World(lines=(line,))
    compile_world(world, store)
    for part in set(CHANGEABLE).difference(parts_of(line), OF_EVERY_LINE):
        world = world.changed(part, 2)
    outcome = compile_world(world, store)
    assert outcome.is_right
    assert not outcome.was_captured, outcome.compiled.miss


def test_two_objects_that_become_one_and_one_that_becomes_two_are_other_worlds(tmp_path, monkeypatch):
    Interpreter(monkeypatch)
    world, store = World(lines=("identity", "element")), Store(tmp_path)
    for count, value in enumerate((2, 1, 2, 1)):
        outcome = compile_world(world.changed("identity", value), store)
        assert outcome.is_right
        assert outcome.was_captured == (count < 2)


# What a mutant of the key leaves out, by the questions that are dropped, with a line and a part that tell.
MUTANTS = {
    "globals of modules": (r"^value\(module\('world", "held", "held"),
    "constants of other modules": (r"sibling", "computed", "computed"),
    "closures and functions": (r"forward\.func", "closure", "closure"),
    "arguments of a partial": (r"forward\.keywords", "partial", "partial"),
    "fields of the config": (r"forward\.args", "nested", "nested"),
    "the environment": (r"environ", "variable", "variable"),
    "types": (r"forward\.func|^type\(|THING\.method|method'", "method", "method"),
    "keys": (r"^(keys|length)\(", "keys", "keys"),
    "membership": (r"^contains\(|^keys\(", "contains", "contains"),
    "lengths": (r"^length\(", "length", "length"),
    "presence of attributes": (r"^(has|own|type|contains)\(|THING|forward\.func", "has", "has"),
    "items": (r"TABLE", "item", "item"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_key_that_leaves_a_part_out_gives_another_program(name, tmp_path, monkeypatch):
    """Each question of the key is needed: without it the proof above would fail."""
    dropped, line, part = MUTANTS[name]
    Interpreter(monkeypatch)

    def ask_less(questions, forward):
        return ask([question for question in questions if not re.search(dropped, question)], forward)

    monkeypatch.setattr(cache, "ask", ask_less)
    keep = cache.keep_questions
    save = cache.save_plan

    def kept(readings):
        return {question: answer for question, answer in readings.items() if not re.search(dropped, question)}

    monkeypatch.setattr(
        cache, "keep_questions", lambda asked, readings, store: keep(asked, kept(readings), store)
    )
    monkeypatch.setattr(
        cache,
        "save_plan",
        lambda plan, factors, guards, store: save(
            plan, factors | {cache.READ: kept(factors[cache.READ])}, guards, store
        ),
    )
    store, world = Store(tmp_path), World(lines=(line,))
    compile_world(world, store)
    assert not compile_world(world.changed(part, 2), store).is_right
