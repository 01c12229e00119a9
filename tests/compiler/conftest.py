"""A store of its own for a test or for all tests of a module."""

import pytest

from lamina.common.store import Store


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    """One store for a module: what one test has compiled another loads."""
    return Store(tmp_path_factory.mktemp("store"))
