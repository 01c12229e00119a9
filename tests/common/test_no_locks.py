"""A file system that knows no locks: one error with the folder and the remedy, nothing raw."""

import errno
import fcntl
import re

import pytest

from lamina.common.errors import StoreError
from lamina.common.store import Store


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_nothing_can_be_locked_the_error_names_the_folder_and_the_remedy(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, "not here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    store, said = Store(tmp_path), re.escape(str(tmp_path)) + ".*knows no locks; set cache_dir"
    with pytest.raises(StoreError, match=said):
        store.put(b"bytes")
    with pytest.raises(StoreError, match=said), store.lock("a"):
        pass
    with pytest.raises(StoreError, match=said), store.new_folder("converted", "key"):
        pass
