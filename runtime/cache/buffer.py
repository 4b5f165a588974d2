"""The full-precision tokens of one sequence in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BufferGrowth:
    """How a full-precision buffer grows and shrinks.

    Attributes:
        step: tokens by which it grows, which bounds its unused room.
        spare: unused tokens, beyond those of the last step, up to which a shrinking buffer stays where it is.
    """

    step: int
    spare: int


CPU_GROWTH = BufferGrowth(16, 0)
# Kernels keep the addresses of buffers, so steps are as long as a page, and one step may stay unused.
GPU_GROWTH = BufferGrowth(128, 128)


class TokenBuffer:
    """Room for keys or values of one sequence: sink tokens, then the tokens after the last page.

    How many of its tokens are in use is recorded in the sequence (`Side.buffered`), and an argument here.

    Args:
        tensor: [H, capacity, channels].
        growth: how it grows and shrinks.
    """

    __slots__ = ("address", "growth", "head_stride", "tensor")

    def __init__(self, tensor: torch.Tensor, growth: BufferGrowth = CPU_GROWTH):
        self.growth = growth
        self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        # Tables read these at every flush, and reading them from the tensor takes much longer. An empty one has no
        # address.
        self.address, self.head_stride = tensor.data_ptr() if tensor.numel() else 0, tensor.stride(0)

    def __deepcopy__(self, memo: dict) -> TokenBuffer:
        return self.copy()

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.tensor.nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all heads."""
        return self.tensor.shape[0] * self.tensor.shape[2] * self.tensor.element_size()

    def copy(self) -> TokenBuffer:
        """A copy with room of its own."""
        return TokenBuffer(self.tensor.clone(), self.growth)

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        """Tokens start..stop-1, a view [H, n, channels]."""
        return self.tensor[:, start:stop]

    def reserve(self, tokens: int, used: int) -> bool:
        """Make room for so many tokens in all, of which the first `used` are there; whether the room has moved."""
        if tokens <= self.tensor.shape[1]:
            return False
        self._move(tokens, [slice(0, used)])
        return True

    def _move(self, tokens: int, kept: list[slice]) -> None:
        """Copy the kept parts, one after another, to new room for `tokens` tokens."""
        new = self.tensor.new_empty(self.tensor.shape[0], self._room(tokens), self.tensor.shape[2])
        at = 0
        for part in kept:
            count = part.stop - part.start
            new[:, at : at + count] = self.tensor[:, part]
            at += count
        self._hold(new)

    def _room(self, tokens: int) -> int:
        return -(-tokens // self.growth.step) * self.growth.step

    def shrinks_to(self, tokens: int) -> bool:
        """Whether the buffer moves to a smaller room when this many tokens remain."""
        return self.tensor.shape[1] > self._room(tokens) + self.growth.spare

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens, and little more room than they need."""
        if self.shrinks_to(tokens):
            self._move(tokens, [slice(0, tokens)])

    def remove(self, parts: list[tuple[int, int]], used: int) -> None:
        """Remove tokens start..stop-1 of each part (start, stop), ascending, out of `used` ones."""
        ends = [*(start for start, _ in parts), used]
        rest = [slice(0, ends[0]), *(slice(stop, end) for (_, stop), end in zip(parts, ends[1:], strict=True))]
        kept = sum(part.stop - part.start for part in rest)
        if self.shrinks_to(kept):
            # With room for the next page, so that a sequence that has been read need not move while it grows.
            self._move(kept + self.growth.spare, rest)
        elif kept > ends[0]:
            self.tensor[:, ends[0] : kept] = torch.cat([self.tensor[:, part] for part in rest[1:]], 1)

    def replace(self, tokens: torch.Tensor) -> None:
        """Hold these tokens [H, n, channels] instead of the present ones."""
        new = self.tensor.new_empty(self.tensor.shape[0], self._room(tokens.shape[1]), self.tensor.shape[2])
        new[:, : tokens.shape[1]] = tokens
        self._hold(new)


def remove_tokens(parts: list[tuple[TokenBuffer, int, int, int]]) -> None:
    """`TokenBuffer.remove` of tokens start..stop-1 of each (buffer, start, stop, used), in few launches for all."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for buffer, start, stop, used in parts:
        kept, moved = used - (stop - start), used - stop
        if not moved and not buffer.shrinks_to(kept):
            continue
        # Tokens that overlap with their destination have to be copied twice.
        if buffer.shrinks_to(kept) or not 0 < moved <= stop - start:
            buffer.remove([(start, stop)], used)
            continue
        # Heads lie apart, and only contiguous tensors share a launch.
        targets += buffer.tensor[:, start:kept].unbind(0)
        sources += buffer.tensor[:, stop:used].unbind(0)
    if targets:
        torch._foreach_copy_(targets, sources)
