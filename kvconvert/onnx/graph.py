"""An ONNX graph under construction, whose weights are written to one file of external data as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from kvconvert.errors import UnsupportedModelError
from kvconvert.kernels.linear.awq_format import AwqWeight, unpack_bits

MICROSOFT = "com.microsoft"
OPSETS = {"": 21, MICROSOFT: 1}
IR_VERSION = 10
# Memory mapping wants offsets at pages; smaller tensors lie in the graph itself.
_ALIGNMENT = 4096
_INLINE_BYTES = 1024

_DTYPES: dict[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.uint8: TensorProto.UINT8,
    torch.int8: TensorProto.INT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
}


class Graph:
    """Nodes in the order of their execution, and weights of which none is kept in memory.

    Args:
        data: file that takes the weights, open for writing.
        data_name: its name relative to the model's file.
    """

    def __init__(self, data: BinaryIO, data_name: str) -> None:
        self._data = data
        self._data_name = data_name
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._scope: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names of nodes inside begin with `name`."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def weight(self, name: str, tensor: Tensor) -> str:
        """Add a tensor; returns its name. A name that is there already is not written again."""
        if name not in self._initializers:
            content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
            proto = TensorProto(name=name, data_type=_DTYPES[tensor.dtype], dims=tensor.shape)
            if content.nbytes <= _INLINE_BYTES:
                proto.raw_data = content.tobytes()
            else:
                self._write(proto, memoryview(content))
            self._initializers[name] = proto
        return name

    def _write(self, proto: TensorProto, content: memoryview) -> None:
        self._data.write(bytes(-self._data.tell() % _ALIGNMENT))
        proto.data_location = TensorProto.EXTERNAL
        entries = {"location": self._data_name, "offset": self._data.tell(), "length": content.nbytes}
        for key, value in entries.items():
            proto.external_data.add(key=key, value=str(value))
        self._data.write(content)

    def has(self, name: str) -> bool:
        """Whether a weight of this name was added."""
        return name in self._initializers

    def integers(self, values: Sequence[int] | int) -> str:
        """An int64 constant."""
        tensor = torch.tensor(values, dtype=torch.int64)
        shown = [values] if isinstance(values, int) else list(values)
        return self.weight(f"{'scalar' if isinstance(values, int) else 'list'}_{'_'.join(map(str, shown))}", tensor)

    def number(self, value: float) -> str:
        """A float32 constant."""
        return self.weight(f"number_{value!r}", torch.tensor(value))

    def node(
        self,
        operation: str,
        inputs: Sequence[str],
        outputs: Sequence[str] | str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node.

        Args:
            operation: of the operator.
            inputs: names; "" for one that is left out.
            outputs: names; None for one output, named after the node; "" for one that is not wanted.
            domain: of the operator.
            attributes: of the operator.

        Returns:
            the name of the first output.
        """
        name = "/".join(["", *self._scope, f"{operation}_{len(self._nodes)}"])
        names = [name] if outputs is None else [outputs] if isinstance(outputs, str) else list(outputs)
        self._nodes.append(helper.make_node(operation, list(inputs), names, name, domain=domain, **attributes))
        return names[0]

    def save(
        self,
        path: Path,
        inputs: Mapping[str, tuple[int, Sequence[int | str]]],
        outputs: Mapping[str, tuple[int, Sequence[int | str]]],
        metadata: Mapping[str, str],
    ) -> None:
        """Write the model's file.

        Args:
            path: of the file, beside that of the weights.
            inputs, outputs: element type and shape by name.
            metadata: properties of the model.
        """
        values = [
            [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in ports.items()]
            for ports in (inputs, outputs)
        ]
        graph = helper.make_graph(self._nodes, "decoder", *values, list(self._initializers.values()))
        opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="kvconvert")
        helper.set_model_props(model, dict(metadata))
        path.write_bytes(model.SerializeToString(deterministic=True))


class MatMulNBitsWeight(NamedTuple):
    """The three tensors of one Linear: w[n, k] = (B - zero_points) scales, of block k // block_size.

    B is uint8 [out, blocks, block_size bits / 8], 8 / bits codes of successive inputs in a byte, the first lowest;
    scales float32 [out, blocks]; zero_points uint8 [out, ceil(blocks bits / 8)], packed alike.
    """

    b: Tensor
    scales: Tensor
    zero_points: Tensor


def stored_bits(weight: AwqWeight) -> int:
    """Width of a code in the graph: ONNX Runtime 1.32 has 2, 4 and 8 bits, so that codes of 3 bits take 4."""
    return 4 if weight.bits == 3 else weight.bits


def repack(weight: AwqWeight, name: str) -> MatMulNBitsWeight:
    """The same codes, zeros and scales in the layout of MatMulNBits: no number changes.

    Args:
        weight: in the bundle's layout.
        name: of the Linear, for the message.

    Raises:
        UnsupportedModelError: a group size that MatMulNBits does not have.
    """
    codes, zeros = unpack_bits(weight.qweight, weight.bits), unpack_bits(weight.qzeros, weight.bits)
    bits = stored_bits(weight)
    groups = zeros.shape[0]
    group_size = codes.shape[0] // groups
    if group_size < 16 or group_size & (group_size - 1):
        raise UnsupportedModelError(
            f"{name} has groups of {group_size} inputs, and ONNX Runtime's MatMulNBits takes powers of two from 16 on; "
            "calibrate with such a group_size."
        )
    return MatMulNBitsWeight(
        b=_bytes(codes.T, bits).unflatten(1, (groups, -1)).contiguous(),
        scales=weight.scales.T.to(torch.float32).contiguous(),
        zero_points=_bytes(torch.nn.functional.pad(zeros.T, (0, -groups % (8 // bits))), bits),
    )


def _bytes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [rows, n] of 2, 4 or 8 bits, n a multiple of 8 / bits, as bytes [rows, n bits / 8]."""
    in_byte = 8 // bits
    packed = codes[:, 0::in_byte].clone()
    for place in range(1, in_byte):
        packed |= codes[:, place::in_byte] << (bits * place)
    return packed
