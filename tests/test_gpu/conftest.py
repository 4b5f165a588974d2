"""Kernels run on a GPU where there is one, else under Triton's interpreter, chosen before Triton is imported."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise pytest.UsageError(
            "Without a GPU tests/test_gpu need TRITON_INTERPRET=1 from the start; `make test` sets it."
        )
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device whose tensors the dispatch gives to the kernels during a test."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    from kvconvert.kernels.device import interpreted

    with interpreted():
        yield torch.device("cpu")
