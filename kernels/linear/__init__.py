"""A Linear with weights of 2, 3, 4 or 8 bits and 16-bit activations, whose weights stay packed on every device.

`w4a16_reference` is the oracle. Which path a call takes depends on the device, the activations' dtype and how many rows
there are; paths with a layout of their own REPLACE the stored `qweight` in memory, and turn it back exactly for state
dicts, copies, casts and moves.

- On a CPU, `int4pack` (not for 8 bits) and `tiled` (kernels/linear/cpu.py).
- On NVIDIA GPUs from Ampere on, Triton kernels for fp16 and bfloat16 activations and groups of 32, 64 or a multiple of
  128 inputs; groups of 32 at 2 and 3 bits only where 64 divides the inputs. `few rows`, the inputs split among the
  warps of a program, codes and activations multiplied exactly; `fused`, weights dequantized between memory and tensor
  cores, their inputs split among programs where there are few outputs; `unpacked`, weights dequantized to memory, at
  most 2^26 at a time, and multiplied by torch's matrix product.

Everything else runs the reference, which dequantizes the whole weight for each call: right, but slower than an
unquantized model. The first such call logs a warning, and `QuantizedLinear.path` tells which path a call takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvconvert.errors import UsageError
from kvconvert.kernels import device as devices
from kvconvert.kernels.linear.awq_format import WEIGHT_BITS, AwqWeight, dequantize_weight, pack_bits
from kvconvert.kernels.linear.cpu import (
    INT4PACK_SHIFT,
    DenseLinear,
    int4pack_product,
    pack_int4,
    takes_int4pack,
    tiled_product,
    unpack_int4pack,
)
from kvconvert.kernels.linear.packed_layout import PackedWeight, has_layout, pack_weight, unpack_codes
from kvconvert.kernels.linear.shared_input import SharedInput, SharedStorage, layout_lock
from kvconvert.kernels.linear.shared_input import unsupported as unshared

Path = Literal["int4pack", "tiled", "few rows", "fused", "unpacked", "reference"]

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
# Most rows of the paths `few rows` and `fused` by the least number of weights: from 4096 x 4096 on as measured on an
# H100 by benchmarks/linear_shapes.py, below on an H200 by benchmarks/gpu_linear.py, before inputs were split.
GPU_FEW_ROWS = {4096 * 6144: 16, 4096 * 4096: 16, 0: 64}
GPU_FUSED_ROWS = {4096 * 6144: 512, 4096 * 4096: 256, 0: 0}


def unsupported(device: torch.device, dtype: torch.dtype, group_size: int) -> str | None:
    """Why the Triton kernels cannot serve activations of this dtype over such a weight; None if they can."""
    reason = devices.unsupported(device)
    if reason is not None:
        return reason
    if dtype not in KERNEL_DTYPES:
        return f"there are kernels for fp16 and bf16 activations, not for {dtype}"
    if not has_layout(group_size):
        return f"there are kernels for groups of 32, 64 or a multiple of 128 inputs, not of {group_size}"
    return None


def w4a16_reference(x: Tensor, weight: AwqWeight, bias: Tensor | None = None) -> Tensor:
    """Dequantize the whole weight and multiply: [..., in] to [..., out].

    The arithmetic is float32 (float64 for float64), the result in the dtype of `x`.
    """
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(accumulate) @ dequantize_weight(weight, accumulate).T
    if bias is not None:
        y += bias.to(accumulate)
    return y.to(x.dtype)


def share_input(linears: Sequence[QuantizedLinear]) -> str | None:
    """Make Linears that read the same tensor compute as one product on a GPU.

    Args:
        linears: q, k and v, say, or gate and up.

    Returns:
        why that cannot be; None if it is done.
    """
    reason = unshared(linears)
    if reason is None:
        SharedInput(linears, packed_product)
    return reason


def keep_values(linears: Iterable[QuantizedLinear], dtype: torch.dtype) -> int:
    """Keep what packed weights stand for beside them, so that products of many rows need not dequantize them anew.

    Results are the same bit for bit. A Linear that is moved, cast or copied goes without.

    Args:
        linears: those without a Triton kernel for activations of `dtype` are passed over.
        dtype: the dtype of activations.

    Returns:
        the bytes that this takes: two for each weight.
    """
    from kvconvert.kernels.linear.triton.many_rows import dequantize

    def values_of(weight: PackedWeight) -> Tensor:
        return dequantize(weight, dtype)

    seen: set[int] = set()
    total = 0
    for linear in linears:
        owner = linear.shared_input.storage if linear.shared_input is not None else linear
        if id(owner) not in seen and linear.unsupported(linear.scales.device, dtype) is None:
            seen.add(id(owner))
            total += owner.keep_values(values_of).untyped_storage().nbytes()
    return total


def gpu_path(rows: int, inputs: int, outputs: int) -> Path:
    """Which of the Triton kernels a product of this number of rows and a weight of this size takes."""
    size = next(least for least in GPU_FEW_ROWS if inputs * outputs >= least)
    if rows <= GPU_FEW_ROWS[size]:
        return "few rows"
    return "fused" if rows <= GPU_FUSED_ROWS[size] else "unpacked"


def gpu_row_counts(weight: PackedWeight) -> range:
    """Numbers of rows among which each way is that a product of this weight may take; those above take the last."""
    size = next(least for least in GPU_FEW_ROWS if weight.inputs * weight.outputs >= least)
    return range(1, max(GPU_FEW_ROWS[size], GPU_FUSED_ROWS[size]) + 2)


def packed_product(rows: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """[n, in] times a packed weight plus a bias [out] by a Triton kernel: [n, out] in the dtype of `rows`."""
    from kvconvert.kernels.linear.triton.few_rows import few_rows
    from kvconvert.kernels.linear.triton.many_rows import prompt, unpacked

    if not rows.shape[0]:
        return rows.new_empty(0, weight.outputs)
    path = gpu_path(rows.shape[0], weight.inputs, weight.outputs)
    if path == "few rows":
        return few_rows(rows, weight, bias=bias)
    if path == "fused":
        return prompt(rows, weight, bias=bias)
    y = unpacked(rows, weight)
    return y if bias is None else y.add_(bias.to(y.dtype))


class QuantizedLinear(nn.Module):
    """A Linear over stored tensors, with their names, shapes and dtypes, so that a checkpoint loads straight in.

    Buffers: qweight int32 [in, out / 8], qzeros int32 [in / group_size, out / 8], scales fp16 [in / group_size, out],
    and bias [out] if any; at 2, 3 and 8 bits the first two are uint8 with out * bits / 8 columns. Scales stay fp16
    whatever dtype the model is cast to. The weights are frozen; gradients flow to the input only.

    Memory: the stored bits per weight, but 4 for 2 and 3 bits in torch's int4 layout. Once a path with a layout of its
    own has run, `qweight` is None, the weights are in `int4pack` (CPU) or `gpu_lanes` (GPU), and 4 bytes per group and
    output channel come on top (0.25 bits per weight for groups of 128); `awq_weight()` gives the stored tensors at any
    time, and `state_dict()` always holds them. Linears may share one buffer (`SharedStorage`), and one product if they
    read the same input (`share_input`).

    Args:
        in_features, out_features: as for `torch.nn.Linear`; multiples of `group_size` and of 8.
        group_size: inputs that share one scale and zero.
        bias: whether there is one.
        device: where the buffers are made, "meta" included.
        bits: width of a weight: 2, 3, 4 or 8.
    """

    qweight: Tensor | None
    qzeros: Tensor
    scales: Tensor
    bias: Tensor | None
    int4pack: Tensor | None
    int4pack_grid: Tensor | None
    gpu_lanes: Tensor | None
    gpu_grid: Tensor | None
    gpu_values: Tensor | None
    storage: SharedStorage | None = None
    shared_input: SharedInput | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group_size: int = 128,
        bias: bool = False,
        device: torch.device | str | None = None,
        bits: int = 4,
    ) -> None:
        super().__init__()
        if bits not in WEIGHT_BITS:
            raise UsageError(f"Weights are stored at 2, 3, 4 or 8 bits, not {bits}.")
        if group_size < 1 or in_features % group_size:
            raise UsageError(f"A group size of {group_size} does not divide the {in_features:,} inputs of this Linear.")
        if out_features % 8:
            raise UsageError(
                f"Outputs are packed by eight; a Linear with {out_features} of them has to stay unquantized."
            )
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        self.bits = bits
        groups = in_features // group_size
        columns, dtype = (out_features // 8, torch.int32) if bits == 4 else (out_features * bits // 8, torch.uint8)
        self.register_buffer("qweight", torch.zeros(in_features, columns, dtype=dtype, device=device))
        self.register_buffer("qzeros", torch.zeros(groups, columns, dtype=dtype, device=device))
        self.register_buffer("scales", torch.zeros(groups, out_features, dtype=torch.float16, device=device))
        self.register_buffer("bias", torch.zeros(out_features, device=device) if bias else None)
        for name in ("int4pack", "int4pack_grid", "gpu_lanes", "gpu_grid", "gpu_values"):
            self.register_buffer(name, None, persistent=False)

    @classmethod
    def from_weight(cls, weight: AwqWeight, bias: Tensor | None = None) -> QuantizedLinear:
        """A module around given tensors, which it does not copy."""
        in_features, groups = weight.qweight.shape[0], weight.scales.shape[0]
        sizes = in_features, weight.scales.shape[1], in_features // groups
        module = cls(*sizes, bias is not None, device="meta", bits=weight.bits)
        module.qweight, module.qzeros, module.scales = weight
        module.bias = bias
        return module

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out] in the dtype of `x`: float32, float16, bfloat16 or float64."""
        if self.shared_input is not None and self.unsupported(x.device, x.dtype) is None:
            y = self.shared_input.output(self, x)
            if y is not None:
                return y
        rows = x.reshape(-1, self.in_features)
        recorded = torch.is_grad_enabled() and x.requires_grad
        y = _FrozenProduct.apply(rows, self) if recorded else self._product(rows)
        return y.view(*x.shape[:-1], self.out_features)

    def path(self, rows: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Path:
        """Which path a call with this number of rows and this dtype takes on a device."""
        device = torch.device(device)
        if device.type == "cpu" and not devices.runs_triton(device):
            return "int4pack" if takes_int4pack(rows, dtype, self.out_features, self.group_size, self.bits) else "tiled"
        if device.type == "cuda" and not torch.cuda.is_available():
            return "reference"
        supported = self.unsupported(device, dtype) is None
        return gpu_path(rows, self.in_features, self.out_features) if supported else "reference"

    def unsupported(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the Triton kernels cannot serve this Linear; None if they can."""
        return unsupported(device, dtype, self.group_size)

    def awq_weight(self) -> AwqWeight:
        """The weight as it is stored, whichever layout is in memory."""
        qweight, packed = self.qweight, self.int4pack
        if qweight is None and packed is not None:
            qweight = pack_bits(unpack_int4pack(packed).T - INT4PACK_SHIFT[self.bits], self.bits)
        elif qweight is None:
            qweight = unpack_codes(self.gpu_weight())
        return AwqWeight(qweight, self.qzeros, self.scales)

    def extra_repr(self) -> str:
        """The sizes, for printing a model."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, group_size={self.group_size}, "
            f"bits={self.bits}, bias={self.bias is not None}"
        )

    def gpu_weight(self) -> PackedWeight | None:
        """The weight in the GPU's layout, if that is in memory."""
        lanes = self.gpu_lanes
        if lanes is None:
            return None
        return PackedWeight(lanes, self.gpu_grid, self.in_features, self.out_features, self.bits, self.gpu_values)

    def keep_values(self, dequantize: Callable[[PackedWeight], Tensor]) -> Tensor:
        """Keep what the weight stands for, as `PackedWeight.values`, as long as the GPU's layout; returns it."""
        self.gpu_values = dequantize(self._packed())
        return self.gpu_values

    def adopt_gpu_weight(self, packed: PackedWeight) -> None:
        """Take this weight's tensors of the GPU's layout in the place of whatever is in memory."""
        # Other threads read qweight, then gpu_lanes: the new layout has to be there before the old one goes.
        self.gpu_grid, self.gpu_lanes, self.qweight = packed.grid, packed.lanes, None

    def leave_cpu_layout(self) -> None:
        """Turn torch's int4 layout back, if that is in memory."""
        if self.int4pack is not None:
            self._to_awq()

    def _product(self, rows: Tensor) -> Tensor:
        """[n, in] to [n, out], bias included."""
        if not rows.shape[0]:
            return rows.new_empty(0, self.out_features)
        path = self.path(rows.shape[0], rows.dtype, rows.device)
        if path == "int4pack":
            packed = self.int4pack
            if packed is None:
                packed = self._to_int4pack()
            y = int4pack_product(rows, packed, self.int4pack_grid, self.group_size)
        elif path == "tiled":
            self._leave_gpu_layout()
            y = tiled_product(rows, self.qweight, self.int4pack, self.qzeros, self.scales)
        elif path == "reference":
            reason = self.unsupported(rows.device, rows.dtype)
            devices.fall_back(f"A Linear with {self.bits}-bit weights", reason)
            return w4a16_reference(rows, self.awq_weight(), self.bias)
        else:
            return packed_product(rows, self._packed(), self.bias)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _packed(self) -> PackedWeight:
        """The weight in the GPU's layout, alone or beside those that share its buffer."""
        if self.gpu_lanes is None:
            self.leave_cpu_layout()
            if self.storage is not None:
                self.storage.packed()
            with layout_lock, torch.inference_mode(False):
                if self.gpu_lanes is None:
                    self.adopt_gpu_weight(pack_weight(AwqWeight(self.qweight, self.qzeros, self.scales)))
        return self.gpu_weight()

    def _to_int4pack(self) -> Tensor:
        """Replace `qweight` by torch's int4 layout, if that has not happened; returns it."""
        self._leave_gpu_layout()
        with layout_lock, torch.inference_mode(False):
            if self.int4pack is None:
                packed, grid = pack_int4(AwqWeight(self.qweight, self.qzeros, self.scales))
                # Other threads read qweight, then int4pack: the new layout has to be there before the old one goes.
                self.int4pack_grid, self.int4pack = grid, packed
                self.qweight = None
        return self.int4pack

    def _leave_gpu_layout(self) -> None:
        """Put the weights back into `qweight` after Triton's interpreter was here."""
        if self.gpu_lanes is not None:
            self._to_awq()

    def _to_awq(self) -> None:
        """Put the weights back into `qweight`."""
        with layout_lock:
            if self.qweight is None:
                self.qweight = self.awq_weight().qweight
                self.int4pack = self.int4pack_grid = self.gpu_lanes = self.gpu_grid = self.gpu_values = None
            if self.storage is not None:
                self.storage.release()

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
        return self.__dict__ | {"storage": None, "shared_input": None}


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
