"""Keys hold what a plan depends on and nothing else; records come back as they were, or not at all."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from lamina.compiler import cache
from lamina.compiler.capture.capture import POSITIONS, TOKEN_IDS
from lamina.compiler.codegen.inductor import load_piece, missing_of_piece, normalise, piece_key
from lamina.compiler.compile import plan_factors
from lamina.compiler.execution.plan import Plan, Step
from lamina.compiler.passes import pipeline

from .tiny import make_tiny

CPU = torch.device("cpu")
PARAMETERS = {"w": ((4, 2), torch.bfloat16), "scale": ((4,), torch.float32)}
STEPS = (Step(piece=None, layer=0, inputs=(TOKEN_IDS, POSITIONS, "w", "w"), outputs=()),)
GUARDS = [{"kind": "TENSOR_MATCH", "subject": "w", "disposition": "checked again when weights bind"}]


def factors_of(tiny, passes=None, numerics="fast"):
    return plan_factors(tiny.program, pipeline.select(passes, numerics), numerics)


def make_plan():
    return Plan(steps=STEPS, pieces=(), parameters=PARAMETERS, result=TOKEN_IDS)


def test_a_plan_comes_back_as_it_was_saved(store):
    factors = factors_of(make_tiny())
    cache.save_plan(make_plan(), factors, GUARDS, store)
    assert cache.load_plan(factors, store, CPU) == (make_plan(), GUARDS)


def test_the_same_model_has_the_same_key():
    keys = {cache.plan_key(factors_of(make_tiny())) for _ in range(2)}
    assert len(keys) == 1


CHANGES = {
    "dtype": {"dtype": torch.bfloat16},
    "layers": {"num_layers": 3},
    "heads": {"num_heads": 2, "num_kv_heads": 2},
    "key heads": {"num_kv_heads": 1},
    "eps": {"rms_norm_eps": 1e-6},
    "bias": {"mlp_bias": True},
    "vocabulary": {"vocab_size": 330},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_the_model_changes_the_key(change):
    assert cache.plan_key(factors_of(make_tiny(**change))) != cache.plan_key(factors_of(make_tiny()))


@pytest.mark.parametrize("name", pipeline.PASS_NAMES)
def test_a_pass_left_out_changes_the_key(name):
    others = tuple(other for other in pipeline.PASS_NAMES if other != name)
    tiny = make_tiny()
    assert cache.plan_key(factors_of(tiny, others)) != cache.plan_key(factors_of(tiny))


def test_another_version_of_a_pass_changes_the_key():
    tiny, passes = make_tiny(), pipeline.PIPELINE
    newer = (replace(passes[0], version=passes[0].version + 1), *passes[1:])
    keys = {cache.plan_key(plan_factors(tiny.program, steps, "fast")) for steps in (passes, newer)}
    assert len(keys) == 2


def test_numerics_and_sources_change_the_key(tmp_path):
    tiny = make_tiny()
    source = tmp_path / "model.py"
    keys = {cache.plan_key(factors_of(tiny)), cache.plan_key(factors_of(tiny, numerics="exact"))}
    for text in ("x = 1", "x = 2"):
        source.write_text(text)
        program = replace(tiny.program, sources=(*tiny.program.sources, source))
        keys.add(cache.plan_key(plan_factors(program, pipeline.PIPELINE, "fast")))
    assert len(keys) == 4


def test_the_place_of_a_source_does_not_change_its_hash(tmp_path):
    hashes = set()
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for name in ("a.py", "b.py"):
            (tmp_path / folder / name).write_text(name)
        hashes.add(cache.hash_files((tmp_path / folder).iterdir()))
    assert len(hashes) == 1


def test_factors_hold_no_path_and_are_plain_json(tmp_path):
    text = json.dumps(factors_of(make_tiny()))
    assert str(tmp_path.parent) not in text
    assert "/work" not in text
    assert "/home" not in text
    assert "Llama" in text  # the architecture is part of the graph; a model's name is not


def test_a_miss_names_the_factor_that_differs(store):
    tiny = make_tiny()
    assert cache.explain_miss(factors_of(tiny), store) == "the cache holds no plan yet"
    cache.save_plan(make_plan(), factors_of(tiny), GUARDS, store)
    cache.save_plan(make_plan(), factors_of(make_tiny(dtype=torch.float64, num_layers=5)), GUARDS, store)
    changed = factors_of(make_tiny(rms_norm_eps=1e-6))
    assert cache.explain_miss(changed, store) == "the nearest of 2 cached plans differs in model.rms_norm_eps"
    without = factors_of(tiny, ("canonicalise",))
    assert cache.explain_miss(without, store) == "the nearest of 2 cached plans differs in passes"


def parts_of(factors):
    """Every factor, and every part of those that have parts, with all factors where that one is another."""
    for name, whole in factors.items():
        if name in cache.IN_PARTS:
            for part, value in whole.items():
                yield f"{name}.{part}", factors | {name: whole | {part: ["other", value]}}
            yield f"{name}.new", factors | {name: whole | {"new": 1}}
        else:
            yield name, factors | {name: ["other", whole]}


def test_each_factor_alone_makes_a_miss_that_names_it_and_back_it_is_a_hit(store):
    factors = factors_of(make_tiny())
    cache.save_plan(make_plan(), factors, GUARDS, store)
    named = []
    for name, changed in parts_of(factors):
        named.append(name)
        assert cache.load_plan(changed, store, CPU) is None
        assert cache.explain_miss(changed, store) == f"the nearest of 1 cached plans differs in {name}"
    assert {"model.num_layers", "parameters", "sources", "passes", "numerics", "toolchain.torch"} <= {*named}
    assert cache.load_plan(factors, store, CPU) == (make_plan(), GUARDS)


def test_of_many_factors_that_differ_the_first_are_listed_and_the_rest_counted(store):
    cache.save_plan(make_plan(), {"model": {"a": 1}, "sources": ""}, GUARDS, store)
    other = {"model": {str(number): 0 for number in range(9)}, "sources": ""}
    assert cache.explain_miss(other, store).endswith(
        "differs in model.0, model.1, model.2, model.3, model.4, model.5, model.6, model.7 and 2 more"
    )


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"nonsense", b'{"record": "0000"}'])
def test_a_damaged_reference_is_a_miss(store, damage):
    factors = factors_of(make_tiny())
    cache.save_plan(make_plan(), factors, GUARDS, store)
    (path,) = (store.root / "refs" / cache.PLANS).iterdir()
    path.write_bytes(damage)
    assert cache.load_plan(factors, store, CPU) is None
    assert cache.explain_miss(factors, store)
    cache.save_plan(make_plan(), factors, GUARDS, store)
    assert cache.load_plan(factors, store, CPU) == (make_plan(), GUARDS)


@pytest.mark.parametrize("field", ["steps", "pieces", "result", "parameters", "guards"])
def test_a_record_without_a_field_is_a_miss(store, field):
    """A record of another version, say: its hash is right and its content is not."""
    factors = factors_of(make_tiny())
    cache.save_plan(make_plan(), factors, GUARDS, store)
    key = cache.plan_key(factors)
    reference = store.read_ref(cache.PLANS, key)
    record = json.loads(store.get(reference["record"]))
    del record[field]
    digest = store.put(json.dumps(record).encode())
    store.write_ref(cache.PLANS, key, reference | {"record": digest})
    assert cache.load_plan(factors, store, CPU) is None


@pytest.mark.parametrize("how", ["file", "value"])
def test_the_record_of_another_plan_is_a_miss(store, how, caplog):
    """Copied by whoever swaps two files, or written under the wrong name."""
    factors, other = factors_of(make_tiny()), factors_of(make_tiny(rms_norm_eps=1e-2))
    for one in (factors, other):
        cache.save_plan(make_plan(), one, GUARDS, store)
    key, wrong = cache.plan_key(factors), cache.plan_key(other)
    if how == "file":
        folder = store.root / "refs" / cache.PLANS
        (folder / f"{key}.json").write_bytes((folder / f"{wrong}.json").read_bytes())
    else:
        store.write_ref(cache.PLANS, key, store.read_ref(cache.PLANS, wrong))
        assert cache.missing_parts(factors, store, must_be_checked=False)
    with caplog.at_level(logging.WARNING):
        assert cache.load_plan(factors, store, CPU) is None
    assert "is the record of plans/" in caplog.text or "its record is of another plan" in caplog.text
    cache.save_plan(make_plan(), factors, GUARDS, store)
    assert cache.load_plan(factors, store, CPU) == (make_plan(), GUARDS)


def test_the_record_of_another_piece_is_a_miss(store):
    store.write_ref("pieces", "a" * 64, {"key": "b" * 64, "source": store.put(b"")})
    assert load_piece("a" * 64, store, CPU) is None
    assert missing_of_piece("a" * 64, store, must_be_checked=False) == "its record was lost"


def test_a_plan_whose_piece_is_gone_is_a_miss(store):
    factors = factors_of(make_tiny())
    cache.save_plan(make_plan(), factors, GUARDS, store)
    key = cache.plan_key(factors)
    reference = store.read_ref(cache.PLANS, key)
    record = json.loads(store.get(reference["record"])) | {"pieces": ["0" * 64]}
    store.write_ref(cache.PLANS, key, reference | {"record": store.put(json.dumps(record).encode())})
    assert cache.load_plan(factors, store, CPU) is None


def test_a_damaged_object_is_reported_once(store, caplog):
    factors = factors_of(make_tiny())
    cache.save_plan(make_plan(), factors, GUARDS, store)
    reference = store.read_ref(cache.PLANS, cache.plan_key(factors))
    store.path(reference["record"]).write_bytes(b"nonsense")
    with caplog.at_level(logging.WARNING):
        assert cache.load_plan(factors, store, CPU) is None
    assert len({id(record) for record in caplog.records if record.levelno >= logging.WARNING}) == 1


def test_a_piece_is_named_by_its_graph_settings_and_toolchain():
    toolchain = {"toolchain": {"torch": "2"}, "numerics": "fast"}
    keys = {
        piece_key("graph", toolchain),
        piece_key("another", toolchain),
        piece_key("graph", toolchain | {"toolchain": {"torch": "3"}}),
        piece_key("graph", toolchain | {"numerics": "exact"}),
    }
    assert len(keys) == 4
    assert piece_key("graph", dict(reversed(toolchain.items()))) in keys


def test_the_counter_of_a_source_is_left_out():
    assert normalise("# AOT ID: ['7_inference']\nimport torch\n") == normalise(
        "# AOT ID: ['0_inference']\nimport torch\n"
    )
