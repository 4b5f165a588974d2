"""What a calibration pass is, and how a decoder layer describes itself to one.

The pipeline takes decoder layers one at a time. For each it makes a `LayerWork` and takes every pass through the same
four steps: `prepare` (changes that need no data), `observe` (hooks while calibration data runs through the layer),
`solve`, `apply`. Then it asks for the `result` and commits it. A pass knows nothing of files, models or the command
line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvconvert.errors import NumericError
from kvconvert.kernels.pages import ChannelScales, LayerFormat
from kvconvert.kernels.quantizer import affine_grid
from kvconvert.kernels.spans import SpanFormat

RECORDING_ATTENTION = "kvconvert_record"
_OBSERVERS = "kvconvert_attention_observers"
_ARGUMENTS = "kvconvert_attention_arguments"

AttentionObserver = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Projection:
    """The rows of a Linear that belong to one projection: all of them, unless the Linear is fused.

    A fused Linear's outputs are `repeats` times a row of blocks, each block a multiple of one unit; a projection is
    block `index` of every repeat. Phi-3's qkv_proj has blocks (query heads, KV heads, KV heads); GPT-NeoX's
    query_key_value repeats (1, 1, 1) for every head; GLM's gate_up_proj is (1, 1).

    Attributes:
        linear: module name within the layer.
        blocks: sizes of the blocks, in units.
        index: of this projection's block.
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
    """A norm and EVERY module that reads its output: scaling the norm is only sound if all readers are scaled back.

    Attributes:
        norm: module name within the layer; None where the readers share an input that no norm can scale.
        readers: Linears (and routers) with this input. The first sees every token.
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
        up: its outputs enter `down` linearly, unless there is an unsupported_reason.
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
        gate, up, down: names within an expert.
    """

    module: str
    count: int
    gate: str
    up: str
    down: str

    def linears(self, number: int) -> tuple[str, str, str]:
        """Gate, up and down projection of one expert."""
        return tuple(f"{self.module}.{number}.{name}" for name in (self.gate, self.up, self.down))

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
        num_attention_heads, num_key_value_heads, head_dim: shape of the attention.
        fold_unsupported_reason: why W_V and W_O may not carry a rotation of the values; None where they may.
        value_scaling_unsupported_reason: why no scale may move from value to output; None where it may.
        unquantized: modules with a weight matrix that is kept, with the reason. Readers of a norm are scaled with it
            all the same.
        experts: the routed ones, whose Linears are among the readers and pairs; None in a dense layer.
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
    fold_unsupported_reason: str | None = None
    value_scaling_unsupported_reason: str | None = None
    unquantized: dict[str, str] = field(default_factory=dict)
    experts: RoutedExperts | None = None

    @cached_property
    def named(self) -> tuple[str, ...]:
        """Every module with a weight matrix that is named here, each once, in reading order."""
        projections = (self.query, self.key, self.value)
        names = [projection.linear for projection in projections if projection is not None]
        names.append(self.output)
        names += [reader for group in self.norm_groups for reader in group.readers]
        names += [name for pair in self.pairs for name in (pair.up.linear, pair.down)]
        names += self.unquantized
        return tuple(dict.fromkeys(names))

    @cached_property
    def linears(self) -> tuple[str, ...]:
        """The Linears to quantize, in reading order."""
        return tuple(name for name in self.named if name not in self.unquantized)


class ChannelBounds(NamedTuple):
    """Smallest and largest number of each channel of a layer's keys or values: float32 [H, channels]."""

    low: Tensor
    high: Tensor

    def scales(self, bits: int, value_clip_ratio: float) -> ChannelScales:
        """The grid from `low` to `high`, shrunk about its middle by `value_clip_ratio`."""
        return ChannelScales(*affine_grid(self.low, self.high, bits, value_clip_ratio))


@dataclass(frozen=True)
class CacheFormat:
    """How the layer's cache will store keys and values: a KV scheme in the terms of kernels.

    Attributes:
        pages: of the layer's pages.
        span: of its spans (CalibQuant), or None where the cache is made of pages.
        rotate_keys: queries and keys are rotated after RoPE.
        rotate_values: values are rotated on write; False where weights carry the rotation.
        sink_tokens, key_recent_tokens, value_recent_tokens: tokens in full precision, see `KVScheme`.
        modality: which tokens go to spans, see `KVScheme`.
        key_bounds, value_bounds: smallest and largest number of each channel, where pages are static and it is known.
    """

    pages: LayerFormat
    span: SpanFormat | None = None
    rotate_keys: bool = False
    rotate_values: bool = False
    sink_tokens: int = 0
    key_recent_tokens: int = 0
    value_recent_tokens: int = 0
    modality: str = "all"
    key_bounds: ChannelBounds | None = None
    value_bounds: ChannelBounds | None = None

    def static_keys(self, value_clip_ratio: float) -> ChannelScales | None:
        """Scales of the layer's static key pages with this range; None for other pages."""
        return None if self.key_bounds is None else self.key_bounds.scales(self.pages.keys.bits, value_clip_ratio)

    def static_values(self, value_clip_ratio: float) -> ChannelScales | None:
        """The same for values."""
        return None if self.value_bounds is None else self.value_bounds.scales(self.pages.values.bits, value_clip_ratio)


@dataclass
class LayerWork:
    """One decoder layer while the passes work on it.

    Attributes:
        name: of the layer in the checkpoint, for messages ("model.layers.3").
        layer: the layer in float32, the passes' own copy: they change its parameters in place.
        structure: names of its parts.
        num_samples, seq_len: calibration sequences, all of equal length; they run through the layer in order.
        dtype: in which the converted model's norms and biases will be stored and loaded.
        cache: how its cache will store keys and values, as far as passes have chosen; None where it stays as it is.
        replay: runs all calibration data once more through the layer as it then is; there from `solve` on.
        visual: which tokens stand for images, bool [num_samples, seq_len]; None where there are none.
    """

    name: str
    layer: nn.Module
    structure: LayerStructure
    num_samples: int
    seq_len: int
    dtype: torch.dtype
    cache: CacheFormat | None = None
    replay: Callable[[], None] | None = None
    visual: Tensor | None = None


@dataclass
class PassResult:
    """What a pass found out about one layer.

    Attributes:
        plan: tensors for the bundle's KV plan, by the names that the pass declares.
        statistics: plain numbers, strings, lists and dicts of them.
        reasons: per Linear (name within the layer), what was not done to it and why.
        scheme: fields of the layer's KV scheme that the pass chose.
        notes: clauses that say what could not be calibrated and why.
    """

    plan: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    scheme: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class CalibrationPass:
    """One method's calibration of one layer; a new object for every layer. Every step is optional.

    Attributes:
        name: of the method.
        plan_tensors: names of the plan tensors that `result` may hold.
        modifies_before_observing: `prepare` changes the layer, so that the source layer has to be kept beside it.
    """

    name: ClassVar[str]
    plan_tensors: ClassVar[tuple[str, ...]] = ()
    modifies_before_observing: bool = False

    def prepare(self, work: LayerWork) -> None:
        """Change the layer before any data is seen."""

    def observe(self, work: LayerWork) -> AbstractContextManager[None]:
        """Hooks on the layer, in place while calibration data runs through it, removed afterwards."""
        return nullcontext()

    def solve(self, work: LayerWork) -> None:
        """Choose parameters from what was observed; changes nothing."""

    def apply(self, work: LayerWork) -> None:
        """Change the layer, or the format of its cache, by the chosen parameters."""

    def result(self) -> PassResult:
        """What to record."""
        return PassResult()


def require_finite(statistics: dict[str, Tensor], what: str, work: LayerWork) -> None:
    """Refuse statistics of a layer's attention that are not numbers; `what` they describe is named in the message.

    Raises:
        NumericError: NaN or infinity among them.
    """
    for name, values in statistics.items():
        if not values.isfinite().all():
            raise NumericError(
                f"The {what} of {work.name}.{work.structure.attention} hold NaN or infinity on the calibration data "
                f"({name}); check the source model's weights."
            )


@contextmanager
def attention_observed(attention: nn.Module, observer: AttentionObserver) -> Iterator[None]:
    """Call `observer(query, key, value)` with what the attention computes on: after q/k norms and RoPE.

    Shapes [B, heads, T, head_dim], with the number of KV heads for key and value. The model has to run with
    `attn_implementation=RECORDING_ATTENTION`. Several observers see the same, in the order of their contexts.
    """
    previous: tuple[AttentionObserver, ...] = getattr(attention, _OBSERVERS, ())
    setattr(attention, _OBSERVERS, (*previous, observer))
    try:
        yield
    finally:
        setattr(attention, _OBSERVERS, previous)


@contextmanager
def attention_arguments(attention: nn.Module) -> Iterator[dict[str, Any]]:
    """A dict that receives what the model passes to attention besides tensors of tokens, as far as it does.

    `scaling` of the dot products, `softcap` of the scores, `s_aux`: logits [heads] of attention sinks.
    """
    found: dict[str, Any] = {}
    setattr(attention, _ARGUMENTS, found)
    try:
        yield found
    finally:
        delattr(attention, _ARGUMENTS)


def _recording_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    for observer in getattr(module, _OBSERVERS, ()):
        observer(query, key, value)
    wanted = getattr(module, _ARGUMENTS, None)
    if wanted is not None:
        wanted |= {name: kwargs[name] for name in ("scaling", "softcap", "s_aux") if kwargs.get(name) is not None}
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return _capped_attention(query, key, value, attention_mask, **kwargs), None


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention with a soft cap on its scores and a sink logit per query head, which torch's function has not."""
    heads, kv_heads = query.shape[1], key.shape[1]
    key, value = (side.repeat_interleave(heads // kv_heads, dim=1) for side in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:
        attention_mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(
            scores.shape[3] - scores.shape[2]
        )
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    else:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous()


AttentionInterface.register(RECORDING_ATTENTION, _recording_attention)
AttentionMaskInterface.register(RECORDING_ATTENTION, sdpa_mask)
