"""What crosses between the core and its client is plain data: it pickles, whatever it holds."""

import pickle

from hypothesis import given

from .engine_data import OUTPUTS, REQUESTS, plain


@given(value=REQUESTS | OUTPUTS)
def test_what_crosses_pickles(value):
    assert plain(pickle.loads(pickle.dumps(value))) == plain(value)
