"""Kernels run on a GPU where there is one, else under Triton's interpreter, chosen before Triton is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    import torch

    if not torch.cuda.is_available():
        if "triton" in sys.modules:
            raise pytest.UsageError(
                "Without a GPU tests/test_gpu need TRITON_INTERPRET=1 from the start; `make test` sets it."
            )
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def launches_know_their_arguments(quick_interpreter: None) -> Iterator[None]:
    """Let the interpreter refuse an argument that a kernel does not have, as a launch on a GPU does; by itself it
    leaves such arguments out.
    """
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.runtime.interpreter import GridExecutor

    call, options = GridExecutor.__call__, CUDAOptions.__dataclass_fields__

    def checked(self: GridExecutor, *args: object, **named: object) -> None:
        unknown = [name for name in named if name not in self.arg_names and name not in options]
        if unknown:
            raise KeyError(f"{self.fn.__name__} has no argument {', '.join(unknown)}")
        call(self, *args, **named)

    GridExecutor.__call__ = checked
    yield
    GridExecutor.__call__ = call


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device whose tensors the dispatch gives to the kernels during a test."""
    import torch

    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    from kvconvert.kernels.device import interpreted

    with interpreted():
        yield torch.device("cpu")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that `torch.empty` gives holds NaN, so that an output nothing wrote to shows."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
