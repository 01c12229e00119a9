"""Guards of every torch that is supported, as facts that a later start can ask about."""

from types import SimpleNamespace

import pytest
from torch._dynamo.source import AttrSource, GlobalSource, UnspecializedNNModuleSource

from lamina.compiler.torch_internals.torch_trace import _fact_of

THING = GlobalSource("THING")


def guard_of_torch_2_11(source):
    def create(builder, guard):
        raise AssertionError("nobody builds it here")

    name = source.name if isinstance(source.name, str) else source.name()
    original = SimpleNamespace(create_fn=create, originating_source=source)
    return SimpleNamespace(guard_type="HASATTR", name=name, value=object(), orig_guard=original)


@pytest.mark.parametrize("wrap", [lambda source: source, UnspecializedNNModuleSource])
def test_whether_an_attribute_is_there_is_asked_of_what_has_it(wrap):
    fact = _fact_of(guard_of_torch_2_11(wrap(AttrSource(THING, "extra"))))
    assert (fact.kind, fact.subject, dict(fact.arguments)) == ("HASATTR", "G['THING']", {"attr": "extra"})
