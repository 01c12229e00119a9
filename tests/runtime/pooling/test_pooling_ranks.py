"""Vectors are the same where workers run in processes of their own, each with a share of the model."""

import numpy as np
import pytest

from ...pooling_models import TEXTS
from .test_embeddings import FP32, open_runtime, vectors


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_of_a_model_in_two_processes_equal_those_of_one(tiny_text_folder, pooling):
    with open_runtime(tiny_text_folder, pooling=pooling) as runtime:
        expected = vectors(runtime.embed(TEXTS))
    settings = {"pooling": pooling, "tensor_parallel": 2, "num_kv_blocks": 64, "prefill_chunk": 16}
    with open_runtime(tiny_text_folder, **settings) as runtime:
        np.testing.assert_allclose(vectors(runtime.embed(TEXTS)), expected, **FP32)
