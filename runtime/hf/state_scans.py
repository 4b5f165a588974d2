"""Scans of state-space layers over sequences side by side, through flash-linear-attention's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# transformers' scan of Mamba 2.
MAMBA_SCAN = "mamba2_chunk_scan"


@lru_cache(maxsize=1)
def has_kernels() -> bool:
    """Whether flash-linear-attention is installed."""
    return find_spec("fla") is not None


def mamba2_scan(ends: Tensor, scan: Callable | None = None) -> Callable:
    """transformers' scan of Mamba 2, of sequences side by side that end at `ends`, int32 [S + 1].

    It is linear attention with a decay for each head (arXiv 2405.21060, eq. 2): C is the query, B the key, and dt x the
    value.

    Args:
        ends: see above.
        scan: flash-linear-attention's function of such attention; None to import it.
    """
    if scan is None:
        from fla.ops.simple_gla import chunk_simple_gla as scan

    def scanned(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        heads = x.shape[2]
        step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        step = (functional.softplus(step) if dt_softplus else step).clamp(*dt_limit)
        key, query = (part.repeat_interleave(heads // part.shape[2], 2) for part in (B, C))
        value = (x * step[..., None]).to(x.dtype)
        output, states = scan(
            query, key, value, g=step * A.float(), scale=1.0, initial_state=initial_states, output_final_state=True,
            state_v_first=True, cu_seqlens=ends,
        )  # fmt: skip
        return (output if D is None else output + D[:, None] * x).to(x.dtype), states

    return scanned


def takes_kernels(function: Callable, device: torch.device) -> bool:
    """Whether `mamba2_scan` stands in for a function on a device."""
    return function.__name__ == MAMBA_SCAN and device.type == "cuda" and has_kernels()
