"""A Linear with 4-bit weights and 16-bit activations (W4A16), whose weights stay packed on every device.

`w4a16_reference` is the oracle. On a CPU two paths give the same result up to the rounding of the input's dtype:

- `int4pack`: torch's int4 matrix product, for bfloat16 and few rows, as in decoding. It wants its own weight layout,
  which then REPLACES AWQ's `qweight` in memory and is turned back exactly for state dicts, copies, casts and moves.
- `tiled`: dequantizes a few hundred output channels at a time into a buffer that stays in the cache, and multiplies.

On NVIDIA GPUs from Ampere on, Triton kernels (kvconvert.kernels.linear.triton.few_rows, which has their layout and their numerics)
serve fp16 and bfloat16 activations and groups of 32, 64 or a multiple of 128 inputs; 4 bits only, as all here. Their
layout replaces `qweight` as torch's does on a CPU. Which of three a call takes depends on its rows and on the outputs:

- `few rows`: the inputs split among the warps of a program, codes and activations multiplied exactly.
- `fused`: weights dequantized between memory and tensor cores.
- `unpacked`: weights dequantized to memory, at most 2^26 at a time, and multiplied by torch's matrix product.

Everything else runs the reference, which dequantizes the whole weight for each call: right, but slower than an
unquantized model. The first such call logs a warning, and `QuantizedLinear.path` tells which path a call takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kvconvert.errors import UsageError
from kvconvert.kernels.device import fall_back, runs_triton, why_not
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight, pack_awq, unpack_awq
from kvconvert.kernels.linear.packed_layout import DTYPES, PackedWeight, pack_weight, supports_group_size, unpack_codes

Path = Literal["int4pack", "tiled", "few rows", "fused", "unpacked", "reference"]

# Measured by benchmarks/cpu_linear.py: for large weights torch's int4 product costs as much as dequantizing between 48
# and 64 rows, for small ones later.
INT4PACK_ROWS = 48
INT4PACK_GROUP_SIZES = (32, 64, 128, 256)
# Weights dequantized at a time. Measured: from 2^18 to 2^21 all are within a tenth, more leaves the cache. A tile has
# at least 128 channels all the same, because narrower ones read half cache lines of `qweight`.
TILE_WEIGHTS = 1 << 20
TILE_CHANNELS = 128
# Channels of the four bytes of an AWQ word, counted from the low end: the low nibbles', then the high nibbles'.
_BYTE_CHANNELS = (0, 4, 1, 5, 2, 6, 3, 7)

# Most rows of the paths `few rows` and `fused`, measured on an H200 by benchmarks/gpu_linear.py; with fewer outputs
# than this, too few programs of the second would run at a time.
GPU_WIDE_OUTPUTS = 8192
GPU_FEW_ROWS = {"wide": 32, "narrow": 64}
GPU_FUSED_ROWS = {"wide": 384, "narrow": 0}

_layout_lock = threading.Lock()


def w4a16_reference(x: Tensor, weight: AwqWeight, bias: Tensor | None = None) -> Tensor:
    """Dequantize the whole weight and multiply: [..., in] to [..., out].

    The arithmetic is float32 (float64 for float64), the result in the dtype of `x`.
    """
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(accumulate) @ dequantize_weight(weight, accumulate).T
    if bias is not None:
        y += bias.to(accumulate)
    return y.to(x.dtype)


class QuantizedLinear(nn.Module):
    """A Linear over AWQ tensors, with their standard names, shapes and dtypes, so that a checkpoint loads straight in.

    Buffers: qweight int32 [in, out / 8], qzeros int32 [in / group_size, out / 8], scales fp16 [in / group_size, out],
    and bias [out] if any. Scales stay fp16 whatever dtype the model is cast to. The weights are frozen; gradients
    flow to the input only.

    Memory: 4 bits per weight in every layout. Once a path with a layout of its own has run, `qweight` is None, the
    weights are in `int4pack` (CPU) or `gpu_lanes` (GPU), and 4 bytes per group and output channel come on top (0.25
    bits per weight for groups of 128); `awq_weight()` gives AWQ's tensors at any time, and `state_dict()` always holds
    them.

    Args:
        in_features, out_features: as for `torch.nn.Linear`; multiples of `group_size` and of 8.
        group_size: inputs that share one scale and zero.
        bias: whether there is one.
        device: where the buffers are made, "meta" included.
    """

    qweight: Tensor | None
    qzeros: Tensor
    scales: Tensor
    bias: Tensor | None
    int4pack: Tensor | None
    int4pack_grid: Tensor | None
    gpu_lanes: Tensor | None
    gpu_grid: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group_size: int = 128,
        bias: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if group_size < 1 or in_features % group_size:
            raise UsageError(f"A group size of {group_size} does not divide the {in_features} inputs of this Linear.")
        if out_features % 8:
            raise UsageError(
                f"AWQ packs outputs by eight; a Linear with {out_features} of them has to stay unquantized."
            )
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        groups = in_features // group_size
        self.register_buffer("qweight", torch.zeros(in_features, out_features // 8, dtype=torch.int32, device=device))
        self.register_buffer("qzeros", torch.zeros(groups, out_features // 8, dtype=torch.int32, device=device))
        self.register_buffer("scales", torch.zeros(groups, out_features, dtype=torch.float16, device=device))
        self.register_buffer("bias", torch.zeros(out_features, device=device) if bias else None)
        for name in ("int4pack", "int4pack_grid", "gpu_lanes", "gpu_grid"):
            self.register_buffer(name, None, persistent=False)

    @classmethod
    def from_weight(cls, weight: AwqWeight, bias: Tensor | None = None) -> QuantizedLinear:
        """A module around given tensors, which it does not copy."""
        in_features, groups = weight.qweight.shape[0], weight.scales.shape[0]
        module = cls(in_features, weight.scales.shape[1], in_features // groups, bias is not None, device="meta")
        module.qweight, module.qzeros, module.scales = weight
        module.bias = bias
        return module

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out] in the dtype of `x`: float32, float16, bfloat16 or float64."""
        rows = x.reshape(-1, self.in_features)
        recorded = torch.is_grad_enabled() and x.requires_grad
        y = _FrozenProduct.apply(rows, self) if recorded else self._product(rows)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def path(self, rows: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Path:
        """Which path a call with so many rows of this dtype takes on a device."""
        device = torch.device(device)
        if self._on_gpu(device):
            if self._no_kernel(dtype) is not None:
                return "reference"
            width = "wide" if self.out_features >= GPU_WIDE_OUTPUTS else "narrow"
            if rows <= GPU_FEW_ROWS[width]:
                return "few rows"
            return "fused" if rows <= GPU_FUSED_ROWS[width] else "unpacked"
        if device.type != "cpu":
            return "reference"
        fits = self.out_features % 16 == 0 and self.group_size in INT4PACK_GROUP_SIZES
        if dtype == torch.bfloat16 and rows <= INT4PACK_ROWS and fits and int4pack_block() is not None:
            return "int4pack"
        return "tiled"

    def awq_weight(self) -> AwqWeight:
        """The weight in AWQ's file layout, whichever layout is in memory."""
        qweight, packed, lanes = self.qweight, self.int4pack, self.gpu_lanes
        if qweight is None and packed is not None:
            qweight = pack_awq(unpack_int4pack(packed).T)
        elif qweight is None:
            qweight = unpack_codes(lanes, self.out_features)
        return AwqWeight(qweight, self.qzeros, self.scales)

    def extra_repr(self) -> str:
        """The sizes, for printing a model."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, group_size={self.group_size}, "
            f"bias={self.bias is not None}"
        )

    def _product(self, rows: Tensor) -> Tensor:
        if not rows.shape[0]:
            return rows.new_empty(0, self.out_features)
        path = self.path(rows.shape[0], rows.dtype, rows.device)
        if path == "reference":
            reason = self._no_kernel(rows.dtype) if self._on_gpu(rows.device) else why_not(rows.device)
            fall_back("A Linear with 4-bit weights", reason)
            return w4a16_reference(rows, self.awq_weight())
        if path in ("few rows", "fused", "unpacked"):
            return self._gpu_product(rows, path)
        if self.gpu_lanes is not None:
            # Triton's interpreter was here.
            self._to_awq()
        if path == "int4pack":
            self._to_int4pack()
            return torch.ops.aten._weight_int4pack_mm_for_cpu(
                rows.contiguous(), self.int4pack, self.group_size, self.int4pack_grid
            )
        return self._tiled_product(rows)

    def _on_gpu(self, device: torch.device) -> bool:
        return (device.type != "cuda" or torch.cuda.is_available()) and runs_triton(device)

    def _no_kernel(self, dtype: torch.dtype) -> str | None:
        """Why the kernels cannot serve activations of this dtype, None if they can."""
        if dtype not in DTYPES:
            return f"there are kernels for fp16 and bf16 activations, not for {dtype}"
        if not supports_group_size(self.group_size):
            return f"there are kernels for groups of 32, 64 or a multiple of 128 inputs, not of {self.group_size}"
        return None

    def _gpu_product(self, rows: Tensor, path: Path) -> Tensor:
        from kvconvert.kernels.linear.triton.few_rows import few_rows
        from kvconvert.kernels.linear.triton.many_rows import prompt, unpacked

        if self.gpu_lanes is None:
            self._to_awq()
            with _layout_lock, torch.inference_mode(False):
                if self.gpu_lanes is None:
                    packed = pack_weight(AwqWeight(self.qweight, self.qzeros, self.scales))
                    # As in `_to_int4pack`, the new layout has to be there before the old one goes.
                    self.gpu_grid, self.gpu_lanes, self.qweight = packed.grid, packed.lanes, None
        product = {"few rows": few_rows, "fused": prompt, "unpacked": unpacked}[path]
        return product(rows, PackedWeight(self.gpu_lanes, self.gpu_grid, self.out_features))

    def _tiled_product(self, rows: Tensor) -> Tensor:
        """`x W` by tiles of output channels, which come out in the order their nibbles lie in ("lanes")."""
        inputs, groups = self.in_features, self.in_features // self.group_size
        qweight, packed = self.qweight, self.int4pack
        tiling = _tiling(inputs, self.out_features, None if packed is None else int4pack_block())
        scales = self.scales.index_select(1, tiling.channel).float()
        zero_bytes = self.qzeros.view(torch.uint8)
        zeros = torch.cat((zero_bytes & 15, zero_bytes >> 4), 1).index_select(1, tiling.zero)
        # CPUs multiply fp16 many times slower than float32, which besides rounds less.
        compute = torch.float32 if rows.dtype == torch.float16 else rows.dtype
        rows_in, products = rows.to(compute), []
        buffer = torch.empty(inputs * max(stop - start for start, stop in tiling.tiles), dtype=torch.float32)
        for start, stop in tiling.tiles:
            half = (stop - start) // 2
            if packed is None:
                codes = qweight.view(torch.uint8)[:, start // 2 : stop // 2]
            else:
                codes = _int4pack_bytes(packed, start, stop)
            values = buffer[: inputs * 2 * half].view(inputs, 2 * half)
            for plane, first in ((codes & 15, 0), (codes >> 4, half)):
                # q - z in bytes, wrapping around: a quarter of the traffic of subtracting floats.
                plane.view(groups, -1, half).sub_(zeros[:, None, start + first : start + first + half])
                values[:, first : first + half] = plane.view(torch.int8)
            values.view(groups, -1, 2 * half).mul_(scales[:, None, start:stop])
            products.append(rows_in @ values.to(compute))
        y = products[0] if len(products) == 1 else torch.cat(products, 1)
        return y.index_select(1, tiling.lane).to(rows.dtype)

    def _to_int4pack(self) -> None:
        """Replace `qweight` by torch's int4 layout; does nothing if that has happened."""
        if self.int4pack is not None:
            return
        with _layout_lock, torch.inference_mode(False):
            if self.int4pack is not None:
                return
            scales, zeros = self.scales.float(), unpack_awq(self.qzeros).float()
            # That product computes w = (q - 8) scale + offset.
            self.int4pack_grid = torch.stack((scales, (8 - zeros) * scales), -1).to(torch.bfloat16)
            step = max(TILE_CHANNELS, TILE_WEIGHTS // self.in_features // TILE_CHANNELS * TILE_CHANNELS)
            chunks = [
                torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_awq(words).T.contiguous().int(), 1)
                for words in self.qweight.split(step // 8, dim=1)
            ]
            # Other threads read qweight, then int4pack: the new layout has to be there before the old one goes.
            self.int4pack = torch.cat(chunks)
            self.qweight = None

    def _to_awq(self) -> None:
        """Put the weights back into `qweight`."""
        with _layout_lock:
            if self.qweight is None:
                self.qweight = self.awq_weight().qweight
                self.int4pack = self.int4pack_grid = self.gpu_lanes = self.gpu_grid = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        self._to_awq()
        # Behind integers, which casts to a floating dtype leave alone, while moves between devices still see them.
        self.scales = self.scales.view(torch.int16)
        try:
            super()._apply(fn, recurse)
        finally:
            self.scales = self.scales.view(torch.float16)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "qweight"] = self.awq_weight().qweight

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._to_awq()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # torch's layout depends on the processor, so that a pickle must not carry it elsewhere.
        self._to_awq()
        return self.__dict__.copy()


class _FrozenProduct(torch.autograd.Function):
    """The product with a gradient for the input that dequantizes anew instead of keeping dequantized weights alive."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, module: QuantizedLinear) -> Tensor:
        ctx.module = module
        return module._product(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        accumulate = torch.float64 if grad.dtype == torch.float64 else torch.float32
        weight = dequantize_weight(ctx.module.awq_weight(), accumulate)
        return (grad.to(accumulate) @ weight).to(grad.dtype), None


class _Tiling(NamedTuple):
    """How the tiles of one shape and layout enumerate output channels; a lane is a column of a tile.

    tiles: (start, stop) lanes of each tile, the first half of them low nibbles, the second high ones.
    channel: int64 [out], the channel of each lane. lane: its inverse. zero: [out], where a lane's zero is in the low
    nibbles of `qzeros`' bytes followed by the high ones.
    """

    tiles: tuple[tuple[int, int], ...]
    channel: Tensor
    lane: Tensor
    zero: Tensor


@lru_cache(maxsize=256)
def _tiling(in_features: int, out_features: int, block: int | None) -> _Tiling:
    """For AWQ's layout (`block` None) or torch's, whose blocks of that many channels split into halves."""
    whole = out_features if block is None else out_features // block * block
    step = max(TILE_CHANNELS, TILE_WEIGHTS // in_features // TILE_CHANNELS * TILE_CHANNELS)
    tiles = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    if whole < out_features:
        tiles.append((whole, out_features))
    with torch.inference_mode(False), torch.device("cpu"):
        parts = []
        for start, stop in tiles:
            channels = torch.arange(start, stop)
            if block is None:
                parts += [channels.view(-1, 8)[:, list(_BYTE_CHANNELS[half : half + 4])].flatten() for half in (0, 4)]
            elif start < whole:
                parts += [channels.view(-1, 2, block // 2)[:, half].flatten() for half in (0, 1)]
            else:
                parts += [channels[half::2] for half in (0, 1)]
        channel = torch.cat(parts)
        words = torch.arange(out_features).view(-1, 8)
        zero_channel = torch.cat([words[:, list(_BYTE_CHANNELS[half : half + 4])].flatten() for half in (0, 4)])
        return _Tiling(tuple(tiles), channel, channel.argsort(), zero_channel.argsort()[channel])


def _int4pack_bytes(packed: Tensor, start: int, stop: int) -> Tensor:
    """Bytes of the channels from `start` to `stop`, blocks or the incomplete last one, as [in, (stop - start) / 2]."""
    half_inputs, block = packed.shape[1], int4pack_block()
    flat = packed.view(-1)[start * half_inputs : stop * half_inputs]
    if (stop - start) % block:
        return flat.view(2 * half_inputs, -1)
    return flat.view(-1, 2 * half_inputs, block // 2).transpose(0, 1).reshape(2 * half_inputs, -1)


def unpack_int4pack(packed: Tensor, block: int | None = None) -> Tensor:
    """Invert torch's `_convert_weight_to_int4pack_for_cpu`: uint8 [out, in / 2] to codes [out, in].

    Blocks of `block` channels (default: this processor's) hold for each input one byte per channel of their first
    half, whose high nibble is the channel half a block further; an incomplete last block pairs neighbouring channels
    instead.
    """
    block = block or int4pack_block()
    out_features, in_features = packed.shape[0], 2 * packed.shape[1]
    whole = out_features // block * block
    body, rest = packed.view(-1).split((whole * in_features // 2, (out_features - whole) * in_features // 2))
    codes = packed.new_empty(out_features, in_features)
    bytes_ = body.view(-1, in_features, block // 2).transpose(1, 2)
    halves = codes[:whole].view(-1, 2, block // 2, in_features)
    halves[:, 0], halves[:, 1] = bytes_ & 15, bytes_ >> 4
    if whole < out_features:
        pairs = rest.view(in_features, -1).T
        codes[whole::2], codes[whole + 1 :: 2] = pairs & 15, pairs >> 4
    return codes


@lru_cache(maxsize=1)
def int4pack_block() -> int | None:
    """Channels per block of torch's int4 layout on this processor, None where that layout is not one we can turn back.

    Known are AVX-512 (64) and AVX2 (32); a small conversion proves it, since torch does not document the layout.
    """
    block = {"AVX512": 64, "AVX2": 32}.get(torch.backends.cpu.get_cpu_capability())
    if block is None:
        return None
    with torch.inference_mode(False), torch.device("cpu"):
        codes = torch.arange(112 * 64).mul(7).remainder(31).remainder(16).view(112, 64)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        return block if torch.equal(unpack_int4pack(packed, block).long(), codes) else None
