"""What tests on a GPU share: kernels that are compiled once, though each module keeps a cache of its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lamina.custom_ops._shared.build import CSRC
from lamina.custom_ops._shared.build_cuda import load_cuda_kernel


@pytest.fixture(scope="session", autouse=True)
def native_kernels() -> None:
    """Every CUDA kernel loaded from the usual cache before a runtime chooses another, which then gets copies.

    Else each module's own cache would begin with minutes of nvcc.
    """
    if torch.cuda.is_available():
        with ThreadPoolExecutor(max_workers=8) as pool:  # those that are missing are compiled at once
            paths = sorted(CSRC.glob("*/*.cu"))
            list(pool.map(lambda path: load_cuda_kernel(path.parent.name, path.stem), paths))
