"""Kernels run on a GPU where there is one, else under Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device whose tensors the dispatch gives to the kernels during a test."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    from kvconvert.kernels.gpu.device import interpreted

    with interpreted():
        yield torch.device("cpu")
