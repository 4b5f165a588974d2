"""What storing the state of a gated delta rule in few bits after every token does to its outputs.

python benchmarks/state_rounding.py

Random keys, queries, and values in float64, 4 heads of 64 x 64, 2,048 tokens, seed 0; the error of the last 256 outputs
relative to those of an exact state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

HEADS, CHANNELS, TOKENS, LAST = 4, 64, 2048, 256
DECAYS = (0.9, 0.99, 0.999, 0.9999)
Store = Callable[[Tensor, int], Tensor]


def rows(state: Tensor, dims: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor]:
    """8-bit codes, unrounded, of rows along `dims`, and their scales."""
    scale = state.abs().amax(dims, keepdim=True).clamp_min(1e-30) / 127
    return state / scale, scale


def per_row(state: Tensor, token: int) -> Tensor:
    codes, scale = rows(state)
    return codes.round() * scale


def per_head(state: Tensor, token: int) -> Tensor:
    codes, scale = rows(state, (-1, -2))
    return codes.round() * scale


def stochastic(state: Tensor, token: int) -> Tensor:
    codes, scale = rows(state)
    return (codes + torch.rand(codes.shape, dtype=codes.dtype)).floor().clamp(-127, 127) * scale


def fed_back(state: Tensor, token: int) -> Tensor:
    """Codes of 8 bits and their rounding error in 4 more, which the next token adds."""
    codes, scale = rows(state)
    rounded = codes.round()
    return (rounded + ((codes - rounded) * 14).round() / 14) * scale


def by_page(state: Tensor, token: int) -> Tensor:
    return per_row(state, token) if token % 128 == 127 else state


STORES: dict[str, Store | None] = {
    "bf16": lambda state, token: state.to(torch.bfloat16).to(state.dtype),
    "fp16": lambda state, token: state.to(torch.float16).to(state.dtype),
    "8 bits per row": per_row,
    "8 bits per head": per_head,
    "8 bits per row, rounded at random": stochastic,
    "8 bits per row, error fed back in 4": fed_back,
    "8 bits per row, every 128 tokens": by_page,
}


def outputs(decay: float, store: Store | None) -> Tensor:
    """The last outputs [LAST, HEADS, CHANNELS] of a layer whose state is stored so."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(TOKENS, HEADS, *shape, generator=generator, dtype=torch.float64)

    keys, queries = (normalize(draw(CHANNELS) + 0.5, dim=-1) for _ in range(2))
    values, rates = draw(CHANNELS), draw().sigmoid()
    state, found = torch.zeros(HEADS, CHANNELS, CHANNELS, dtype=torch.float64), []
    torch.manual_seed(0)
    for token in range(TOKENS):
        state = state * decay
        read = torch.einsum("hkv,hk->hv", state, keys[token])
        change = (values[token] - read) * rates[token, :, None]
        state = state + keys[token][..., None] * change[:, None]
        found.append(torch.einsum("hkv,hk->hv", state, queries[token]))
        if store is not None:
            state = store(state, token)
    return torch.stack(found[-LAST:])


def main() -> None:
    """Print a table: one row per way of storing, one column per decay."""
    exact = {decay: outputs(decay, None) for decay in DECAYS}
    print(f"| state after every token | {' | '.join(map(str, DECAYS))} |")
    for name, store in STORES.items():
        errors = [(outputs(decay, store) - exact[decay]).norm() / exact[decay].norm() for decay in DECAYS]
        print(f"| {name} | {' | '.join(f'{error:.4f}' for error in errors)} |")


if __name__ == "__main__":
    main()
