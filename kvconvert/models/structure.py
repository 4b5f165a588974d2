"""The parts of a decoder layer: what its modules are called, and what may be done to them.

`kvconvert.convert.discovery` finds them, calibration passes read them; they hold names and numbers, no modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Projection:
    """The rows of a Linear that belong to one projection: all of them, unless the Linear is fused.

    A fused Linear's outputs are `repeats` times a row of blocks, each block a multiple of one unit; a projection is
    block `index` of every repeat. Phi-3's qkv_proj has blocks (query heads, KV heads, KV heads); GPT-NeoX's
    query_key_value repeats (1, 1, 1) for every head; GLM's gate_up_proj is (1, 1).

    Attributes:
        linear: module name within the layer.
        blocks: sizes of the blocks, in units.
        index: the number of this projection's block.
        repeats: how often the blocks follow one another.
    """

    linear: str
    blocks: tuple[int, ...] = (1,)
    index: int = 0
    repeats: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether every row of the Linear belongs to it."""
        return len(self.blocks) == 1

    def rows(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Its part of the Linear's weight or bias (dimension 0) or outputs (dimension -1), in order."""
        if self.is_whole:
            return tensor
        dim %= tensor.ndim
        start = sum(self.blocks[: self.index])
        units = tensor.unflatten(dim, (self.repeats, sum(self.blocks), -1))
        return units.narrow(dim + 1, start, self.blocks[self.index]).flatten(dim, dim + 2)

    def write(self, tensor: Tensor, rows: Tensor) -> None:
        """Put `rows` in the place of its part of a weight or bias."""
        if self.is_whole:
            tensor.copy_(rows)
            return
        start = sum(self.blocks[: self.index])
        part = tensor.unflatten(0, (self.repeats, sum(self.blocks), -1))[:, start : start + self.blocks[self.index]]
        part.copy_(rows.view_as(part))


@dataclass(frozen=True)
class NormGroup:
    """A norm and EVERY module that reads its output: scaling the norm is only correct if all readers are scaled back.

    Attributes:
        norm: module name within the layer; None where the readers share an input that no norm can scale.
        readers: Linears (and routers) with this input. The first gets every token.
        inspected: modules whose added outputs' error the scale search minimises; their input is the norm's output.
        unit_offset: the norm multiplies by (1 + weight) instead of weight.
        unsupported_reason: why the norm may not be scaled; None where it may.
    """

    norm: str | None
    readers: tuple[str, ...]
    inspected: tuple[str, ...]
    unit_offset: bool = False
    unsupported_reason: str | None = None


@dataclass(frozen=True)
class ScalingPair:
    """A projection and the Linear that reads it.

    Attributes:
        up: its outputs enter `down` linearly, unless `unsupported_reason` is set.
        down: name of the reading Linear.
        unsupported_reason: why a scale may not move from one to the other; None where it may.
    """

    up: Projection
    down: str
    unsupported_reason: str | None = None


@dataclass(frozen=True)
class RoutedExperts:
    """The Linears of a layer's routed experts: expert 3's are "{module}.3.{gate}" and so on.

    Attributes:
        module: hands each expert the tokens that the router chose it for; its `compute(number, tokens)` runs one
            expert on given tokens, [n, hidden] to [n, hidden].
        count: how many experts there are.
        gate, up, down: names within an expert; `gate` is None where experts have none.
    """

    module: str
    count: int
    gate: str | None
    up: str
    down: str

    def linears(self, number: int) -> tuple[str, ...]:
        """Gate, if there is one, up and down projection of one expert."""
        return tuple(f"{self.module}.{number}.{name}" for name in (self.gate, self.up, self.down) if name is not None)

    def owner(self, linear: str) -> int | None:
        """The expert that a Linear belongs to; None for others."""
        if not linear.startswith(f"{self.module}."):
            return None
        number = linear[len(self.module) + 1 :].split(".")[0]
        return int(number) if number.isdigit() else None


@dataclass(frozen=True)
class LayerStructure:
    """The names of a decoder layer's parts, relative to the layer, and what may be done to them.

    Attributes:
        attention: the module that mixes tokens; unless query, key and value are None, it calls transformers'
            attention interface with tensors of the shape below.
        query, key, value: its projections; None where it has no such thing (linear or latent attention), or, for
            value, where keys serve as values.
        output: Linear that reads what the attention computes.
        norm_groups: see `NormGroup`.
        pairs: see `ScalingPair`; value -> output is not among them.
        num_attention_heads, num_key_value_heads, head_dim: shape of the attention, and channels of a value.
        key_dim: channels of a key; None where it has those of a value.
        attends_once: attention is computed in one call.
        fold_unsupported_reason: why W_V and W_O may not carry a rotation of the values; None where they may.
        value_scaling_unsupported_reason: why no scale may move from value to output; None where it may.
        unquantized: modules with a weight matrix that is kept, with the reason. Readers of a norm are scaled with it
            all the same.
        experts: the routed ones, whose Linears are among the readers and pairs; None in a dense layer.
        adds_to_stream: what the output and the down projection compute is added to the residual stream as it is.
    """

    attention: str
    query: Projection | None
    key: Projection | None
    value: Projection | None
    output: str
    norm_groups: tuple[NormGroup, ...]
    pairs: tuple[ScalingPair, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    key_dim: int | None = None
    attends_once: bool = True
    fold_unsupported_reason: str | None = None
    value_scaling_unsupported_reason: str | None = None
    unquantized: dict[str, str] = field(default_factory=dict)
    experts: RoutedExperts | None = None
    adds_to_stream: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """KV heads, and channels of a head's keys and values."""
        return self.num_key_value_heads, self.key_dim or self.head_dim, self.head_dim

    @cached_property
    def writers(self) -> dict[str, tuple[str, str]]:
        """Linears that add to the residual stream; {} where unknown.

        With each the norms whose inputs are the stream before and after it, the latter "" where the layer ends.
        """
        norms = [group.norm for group in self.norm_groups]
        known = self.adds_to_stream and self.experts is None and len(self.pairs) == 1
        if not known or len(norms) != 2 or None in norms:
            return {}
        first, second = norms
        return {self.output: (first, second), self.pairs[0].down: (second, "")}

    @cached_property
    def named(self) -> tuple[str, ...]:
        """Every module with a weight matrix that is named here, each once, in reading order."""
        projections = (self.query, self.key, self.value)
        names = [projection.linear for projection in projections if projection is not None]
        readers = [reader for group in self.norm_groups for reader in group.readers]
        names += [reader for reader in readers if reader.startswith(f"{self.attention}.")]
        names += [self.output, *readers]
        names += [name for pair in self.pairs for name in (pair.up.linear, pair.down)]
        names += self.unquantized
        return tuple(dict.fromkeys(names))

    @cached_property
    def linears(self) -> tuple[str, ...]:
        """The Linears to quantize, in reading order."""
        return tuple(name for name in self.named if name not in self.unquantized)
