"""The decoder as an ONNX graph: embeddings, layers, logits. Weights go to one file of external data as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from kvconvert.errors import UnsupportedModelError
from kvconvert.io.records import TensorInfo
from kvconvert.kernels.linear.awq_format import AwqWeight, unpack_bits
from kvconvert.onnx.architecture import DecoderShape, StaticCache, StaticLayer, StaticSide

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


Shapes = dict[str, tuple[int, list[int | str]]]


@dataclass(frozen=True)
class Weights:
    """The bundle's weights.

    Attributes:
        infos: type and shape of every tensor by name.
        read: gives a tensor by name.
        accuracy_level: of MatMulNBits; 0 multiplies in float32, 4 rounds activations to int8 in blocks.
    """

    infos: Mapping[str, TensorInfo]
    read: Callable[[str], Tensor]
    accuracy_level: int


class DecoderGraph:
    """Builds the graph of one model.

    Args:
        decoder: the model's shape.
        weights: its weights.
        graph: takes nodes and weights.
        cache: the quantized cache; None for one in float32.
    """

    def __init__(self, decoder: DecoderShape, weights: Weights, graph: Graph, cache: StaticCache | None) -> None:
        self.decoder = decoder
        self.weights = weights
        self.graph = graph
        self.cache = cache

    def build(self) -> None:
        """Add everything from token ids to logits."""
        decoder, graph = self.decoder, self.graph
        self._lengths()
        embedding = self._matrix("model.embed_tokens.weight", wide=False)
        hidden = self._wide(graph.node("Gather", [embedding, "input_ids"]), "model.embed_tokens.weight")
        if decoder.embedding_scale != 1:
            hidden = graph.node("Mul", [hidden, graph.number(decoder.embedding_scale)])
        branch: str | None = None
        for layer in range(decoder.num_layers):
            with graph.scope(f"layers.{layer}"):
                hidden, branch = self._layer(layer, hidden, branch)
        normed, _ = self._norm("model.norm", hidden, branch)
        logits = self._linear(self._head(), normed, None if decoder.final_softcap else "logits")
        if decoder.final_softcap:
            cap = graph.number(decoder.final_softcap)
            graph.node("Mul", [graph.node("Tanh", [graph.node("Div", [logits, cap])]), cap], "logits")

    def inputs(self) -> Shapes:
        """Element types and shapes of what the graph takes."""
        ids: list[int | str] = ["batch", "tokens"]
        ports: Shapes = {"input_ids": (TensorProto.INT64, ids)}
        ports["attention_mask"] = (TensorProto.INT64, ["batch", "total"])
        return ports | self._caches("past_key_values", "past")

    def outputs(self) -> Shapes:
        """Element types and shapes of what it gives."""
        logits: list[int | str] = ["batch", "tokens", self.decoder.vocab_size]
        return {"logits": (TensorProto.FLOAT, logits)} | self._caches("present", "present")

    def _caches(self, prefix: str, length: str) -> Shapes:
        bits = 32 if self.cache is None else self.cache.bits
        kind = {32: TensorProto.FLOAT, 8: TensorProto.INT8, 4: TensorProto.UINT8}[bits]
        channels = self.decoder.head_dim // (2 if bits == 4 else 1)  # two codes in a byte
        shape: list[int | str] = ["batch", self.decoder.num_kv_heads, length, channels]
        return {
            f"{prefix}.{layer}.{side}": (kind, shape)
            for layer in range(self.decoder.num_layers)
            for side in ("key", "value")
        }

    def _lengths(self) -> None:
        """What attention needs of the mask: tokens of each sequence, and of the longest; positions of new tokens.

        A sequence's new tokens are the last ones that its mask has, or, of a prompt padded at its end, the first ones.
        """
        graph = self.graph
        lengths = graph.node("ReduceSum", ["attention_mask", graph.integers([1])], keepdims=1)
        last = graph.node("Sub", [lengths, graph.integers(1)])
        flat = graph.node("Squeeze", [last, graph.integers([1])])
        graph.node("Cast", [flat], "last_position", to=TensorProto.INT32)
        total = graph.node("Gather", [graph.node("Shape", ["attention_mask"]), graph.integers(1)])
        graph.node("Cast", [total], "total_length", to=TensorProto.INT32)
        if self.cache is not None:
            count = graph.node("Gather", [graph.node("Shape", ["input_ids"]), graph.integers(1)])
            first = graph.node("Max", [graph.node("Sub", [lengths, count]), graph.integers(0)])
            steps = graph.node("Range", [graph.integers(0), count, graph.integers(1)])
            graph.node("Add", [first, steps], "position_ids")

    def _layer(self, layer: int, hidden: str, branch: str | None) -> tuple[str, str]:
        """One layer: takes and gives the residual stream, and what has still to be added to it."""
        name = f"model.layers.{layer}"
        normed, hidden = self._norm(f"{name}.input_layernorm", hidden, branch)
        branch = self._attention(layer, f"{name}.self_attn", normed)
        before_mlp = "post_attention_layernorm"
        if self.decoder.output_norms:
            branch, _ = self._norm(f"{name}.post_attention_layernorm", branch)
            before_mlp = "pre_feedforward_layernorm"
        normed, hidden = self._norm(f"{name}.{before_mlp}", hidden, branch)
        branch = self._mlp(f"{name}.mlp", normed)
        if self.decoder.output_norms:
            branch, _ = self._norm(f"{name}.post_feedforward_layernorm", branch)
        return hidden, branch

    def _attention(self, layer: int, name: str, x: str) -> str:
        decoder, graph = self.decoder, self.graph
        query, key, value = (self._linear(f"{name}.{side}_proj", x) for side in "qkv")
        if decoder.qk_norm:
            query = self._head_norm(f"{name}.q_norm", query, decoder.num_heads)
            key = self._head_norm(f"{name}.k_norm", key, decoder.num_kv_heads)
        tables = self._rotary_tables(decoder.rotary[layer])
        attributes = {
            "num_heads": decoder.num_heads,
            "kv_num_heads": decoder.num_kv_heads,
            "scale": decoder.attention_scale,
            "local_window_size": decoder.windows[layer] or -1,
            "softcap": decoder.attention_softcap,
        }
        past = [f"past_key_values.{layer}.{side}" for side in ("key", "value")]
        present = [f"present.{layer}.{side}" for side in ("key", "value")]
        lengths = ["last_position", "total_length"]
        output = f"/layers.{layer}/attention"
        if self.cache is None:
            inputs = [query, key, value, *past, *lengths, *tables]
            graph.node("GroupQueryAttention", inputs, [output, *present], MICROSOFT, do_rotary=1, **attributes)
            return self._linear(f"{name}.o_proj", output)
        # The centers of keys are those of rotated keys, so that the operator cannot rotate by itself.
        rotated = [graph.node("RotaryEmbedding", [x, "position_ids", *tables], domain=MICROSOFT) for x in (query, key)]
        static = self.cache.layers[layer]
        key = graph.node("Sub", [rotated[1], self._center(name, "key", static.key)])
        value = graph.node("Sub", [value, self._center(name, "value", static.value)])
        inputs = [rotated[0], key, value, *past, *lengths, *[""] * 5, *self._scales(name, static)]
        types = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": self.cache.bits}
        graph.node("GroupQueryAttention", inputs, [output, *present], MICROSOFT, **attributes, **types)
        of_query_heads = static.value.center.repeat_interleave(decoder.num_heads // decoder.num_kv_heads, 0)
        center = graph.weight(f"{name}.output_center", of_query_heads.flatten())
        return self._linear(f"{name}.o_proj", graph.node("Add", [output, center]))

    def _center(self, name: str, side: str, static: StaticSide) -> str:
        return self.graph.weight(f"{name}.{side}_center", static.center.flatten())

    def _scales(self, name: str, static: StaticLayer) -> list[str]:
        """Scales [KV heads, 1, head_dim] of keys and values."""
        return [
            self.graph.weight(f"{name}.{side}_scale", scales.scale[:, None])
            for side, scales in zip(("key", "value"), static, strict=True)
        ]

    def _mlp(self, name: str, x: str) -> str:
        graph = self.graph
        gate, up = (self._linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
        if self.decoder.activation == "silu":
            activated = graph.node("Mul", [gate, graph.node("Sigmoid", [gate])])
        else:
            approximate = "none" if self.decoder.activation == "gelu" else "tanh"
            activated = graph.node("Gelu", [gate], approximate=approximate)
        return self._linear(f"{name}.down_proj", graph.node("Mul", [activated, up]))

    def _norm(self, name: str, x: str, branch: str | None = None) -> tuple[str, str]:
        """RMSNorm of x, or of x + branch; returns it and the sum."""
        graph, epsilon = self.graph, self.decoder.norm_epsilon
        weight = self._norm_weight(name)
        if branch is None:
            # An operator of ONNX Runtime that is registered in ONNX's own domain.
            normed = graph.node("SimplifiedLayerNormalization", [x, weight], axis=-1, epsilon=epsilon, stash_type=1)
            return normed, x
        normed, total = f"/{name}", f"/{name}/sum"
        operation = "SkipSimplifiedLayerNormalization"
        graph.node(operation, [x, branch, weight], [normed, "", "", total], MICROSOFT, epsilon=epsilon)
        return normed, total

    def _head_norm(self, name: str, x: str, heads: int) -> str:
        """RMSNorm of each head of x [batch, tokens, heads * head_dim]."""
        graph, size = self.graph, self.decoder.head_dim
        split = graph.node("Reshape", [x, graph.integers([0, 0, heads, size])])
        normed, _ = self._norm(name, split)
        return graph.node("Reshape", [normed, graph.integers([0, 0, heads * size])])

    def _norm_weight(self, name: str) -> str:
        if self.graph.has(f"{name}.weight"):
            return f"{name}.weight"
        return self.graph.weight(
            f"{name}.weight", self.weights.read(f"{name}.weight").float() + self.decoder.norm_offset
        )

    def _rotary_tables(self, kind: str) -> tuple[str, str]:
        names = f"rotary.{kind}.cos", f"rotary.{kind}.sin"
        if not self.graph.has(names[0]):
            for name, table in zip(names, self.decoder.rotary_table(kind), strict=True):
                self.graph.weight(name, table)
        return names

    def _linear(self, name: str, x: str, output: str | None = None) -> str:
        """A Linear, packed or kept, with its bias if it has one."""
        graph, names = self.graph, self.weights.infos
        bias = f"{name}.bias" if f"{name}.bias" in names else ""
        if bias:
            graph.weight(bias, self.weights.read(bias).float())
        if f"{name}.qweight" not in names:
            weight = self._matrix(f"{name}.weight")
            product = graph.node("FusedMatMul", [x, weight], None if bias else output, MICROSOFT, transB=1)
            return graph.node("Add", [product, bias], output) if bias else product
        packed = AwqWeight(*(self.weights.read(f"{name}.{part}") for part in AwqWeight._fields))
        inputs, outputs = packed.qweight.shape[0], packed.scales.shape[1]
        block_size = inputs // packed.qzeros.shape[0]
        parts = repack(packed, name)._asdict().items()
        tensors = [graph.weight(f"{name}.{part}", tensor) for part, tensor in parts]
        return graph.node(
            "MatMulNBits",
            [x, *tensors, *(["", bias] if bias else [])],
            output,
            MICROSOFT,
            K=inputs,
            N=outputs,
            bits=stored_bits(packed),
            block_size=block_size,
            accuracy_level=self.weights.accuracy_level,
        )

    def _matrix(self, name: str, wide: bool = True) -> str:
        """A matrix that was kept, stored in its own dtype; read as float32 with `wide`."""
        if not self.graph.has(name):
            self.graph.weight(name, self.weights.read(name))
        return self._wide(name, name) if wide else name

    def _wide(self, x: str, name: str) -> str:
        """x, which has the dtype of the tensor `name`, in float32."""
        if self.weights.infos[name].dtype == "F32":
            return x
        return self.graph.node("Cast", [x], to=TensorProto.FLOAT)

    def _head(self) -> str:
        """The module of the logits: a tied head is the embedding."""
        own = self.weights.infos.keys() & {"lm_head.weight", "lm_head.qweight"}
        return "lm_head" if own else "model.embed_tokens"
