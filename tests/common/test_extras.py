"""A module of an extra that is missing is named with the extra that installs it."""

import sys

import pytest

from lamina import UnsupportedError
from lamina.common.extras import require


def test_a_module_that_is_there_is_returned():
    assert require("json", extra="serve").dumps([1]) == "[1]"


def test_a_missing_one_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(UnsupportedError, match=r"msgspec.*pip install 'lamina\[serve\]'"):
        require("msgspec", extra="serve")
    with pytest.raises(UnsupportedError, match=r"no_such_package.*lamina\[otel\]"):
        require("no_such_package.part", extra="otel")


def test_what_a_module_lacks_itself_is_its_own_fault(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        require("half_there", extra="serve")
