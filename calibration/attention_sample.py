"""A bounded sample of one layer's attention, in the cache's coordinates, on which searches evaluate their candidates.

Whole sequences, evenly spaced over the calibration data, at most `SAMPLE_SEQUENCES`: attention mixes tokens, and pages
are whole. The sample is taken from the finished layer (weights folded, scaled and clipped), because AWQ's scaling of
values changes what a cache has to store.

Queries, keys and values are seen through an attention function that is registered with transformers as
`RECORDING_ATTENTION`. A model built with that implementation computes as with SDPA, and the observers of a layer's
attention module get what its attention computes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from kvconvert.calibration.activations import same_arguments
from kvconvert.calibration.protocol import CalibrationPass, LayerWork, require_finite
from kvconvert.kernels.attention import choice_of
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.models.masks import tensor_mask

RECORDING_ATTENTION = "kvconvert_record"
_OBSERVERS = "kvconvert_attention_observers"
_ARGUMENTS = "kvconvert_attention_arguments"

AttentionObserver = Callable[[Tensor, Tensor, Tensor], None]


@contextmanager
def attention_observed(attention: nn.Module, observer: AttentionObserver) -> Iterator[None]:
    """Call `observer(query, key, value)` with what the attention computes on: after q/k norms and RoPE.

    Shapes [B, heads, T, head_dim], with the number of KV heads for key and value. The model has to run with
    `attn_implementation=RECORDING_ATTENTION`. Several observers get the same tensors, in the order of their contexts.
    """
    previous: tuple[AttentionObserver, ...] = getattr(attention, _OBSERVERS, ())
    setattr(attention, _OBSERVERS, (*previous, observer))
    try:
        yield
    finally:
        setattr(attention, _OBSERVERS, previous)


@contextmanager
def attention_arguments(attention: nn.Module) -> Iterator[dict[str, Any]]:
    """A dict of the arguments, other than tokens' tensors, that the model passes to attention: those of these it has.

    `scaling` of the dot products, `softcap` of the scores, `s_aux`: sink logits [heads].
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
    return model_attention(module, query, key, value, attention_mask, **kwargs), None


def model_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention as the model means it, with the arguments that the model passes: [B, T, heads, head_dim]."""
    choice = choice_of(indices, block_indices, getattr(module.config, "index_block_size", None))
    if choice is not None and not choice.is_all_of(key.shape[2]):
        attention_mask = choice.mask(attention_mask, query.shape[1], key.shape[2])
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
    return _capped_attention(query, key, value, attention_mask, **kwargs)


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
    """Attention with a soft cap on its scores and a sink logit per query head, which torch's function lacks."""
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
AttentionMaskInterface.register(RECORDING_ATTENTION, tensor_mask)


SAMPLE_SEQUENCES = 8
SAMPLE_TOKENS = 2**14  # at most: of longer sequences fewer are kept, in float32 and several copies


@dataclass(frozen=True)
class AttentionSample:
    """Attention of n sequences of T tokens, float32, after q/k norms, RoPE and the cache's rotations.

    Attributes:
        queries: [n, Hq, T, D]; keys: [n, H, T, D]; values: [n, H, T, E].
        scaling: factor of the dot products.
        visible: bool [T, T], or [n, T, T] where sequences differ: which keys (columns) a query (row) attends to.
        output_weight: [hidden, Hq * E], the output projection of concatenated heads, or None; turns an error of the
            heads' outputs into one of the layer's output. It undoes the rotation of folded values, and is rotated too
            where values are rotated at run time.
        visual: bool [n, T], which tokens stand for images; None where the data has none.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        sink_logits: [Hq], logits of a virtual token without a value that every query attends to (gpt-oss).
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    visible: Tensor
    output_weight: Tensor | None = None
    visual: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence."""
        return self.queries.shape[2]

    def grouped_queries(self, sequence: int) -> Tensor:
        """Queries of one sequence, [H, Hq / H, T, D], the query heads of a KV head together."""
        return self.queries[sequence].unflatten(0, (self.keys.shape[1], -1))

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores before the softmax, [..., H, Hq / H, q, k], of queries [..., H, Hq / H, q, D], keys [..., H, k, D]."""
        scores = queries @ keys.unsqueeze(-3).transpose(-2, -1) * self.scaling
        return scores if not self.softcap else torch.tanh(scores / self.softcap) * self.softcap

    def weights(self, scores: Tensor) -> Tensor:
        """Softmax of scores [..., H, Hq / H, q, k], those of invisible tokens being -inf."""
        if self.sink_logits is None:
            return scores.softmax(-1)
        sinks = self.sink_logits.view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]

    def visible_in(self, sequence: int) -> Tensor:
        """`visible` of one sequence, bool [T, T]."""
        return self.visible if self.visible.dim() == 2 else self.visible[sequence]


def causal(num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Bool [T, T]: each query attends to itself and to the tokens before it."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()


def squared_output(heads: Tensor, output_weight: Tensor | None) -> Tensor:
    """Squared size of the layer's output, summed over queries: float64 [...].

    Args:
        heads: their outputs, or errors of these, [..., H, Hq / H, q, E].
        output_weight: see `AttentionSample`.
    """
    rows = heads.flatten(-4, -3).transpose(-3, -2).flatten(-2)
    if output_weight is not None:
        rows = rows @ output_weight.T
    return rows.square().sum((-2, -1), dtype=torch.float64)


def as_cached(queries: Tensor, keys: Tensor, values: Tensor, cache: LayerFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [..., head_dim] in the cache's coordinates (after its rotations), in float32."""
    queries, keys, values = queries.float(), keys.float(), values.float()
    if cache.rotations.keys:
        queries, keys = hadamard_transform(queries), hadamard_transform(keys)
    if cache.rotations.values:
        values = hadamard_transform(values)
    return queries, keys, values


class AttentionPass(CalibrationPass, ABC):
    """A pass that observes what a layer's attention computes on: after q/k norms and RoPE."""

    @abstractmethod
    def see(self, work: LayerWork, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Take a batch [B, heads, T, head_dim], with the number of KV heads for key and value."""

    @contextmanager
    def observe(self, work: LayerWork) -> Iterator[None]:
        """Let the pass see the layer's attention."""
        with attention_observed(work.layer.get_submodule(work.structure.attention), partial(self.see, work)):
            yield


class AttentionSampler(CalibrationPass):
    """Keeps a few of the layer's inputs and, once earlier passes have changed the layer, runs them through it.

    Stands in the list of passes after those that change weights and before those that read `sample`.

    Attributes:
        sample: there from `solve` on.
        position_embeddings: what the layer got under that name, or None.
    """

    name = "attention_sample"

    def __init__(self, sequences: int = SAMPLE_SEQUENCES) -> None:
        self.sequences = sequences
        self.sample: AttentionSample | None = None
        self.position_embeddings: Any = None
        self._inputs: list[tuple[Tensor, dict[str, Any]]] = []
        self._chosen: list[int] = []
        self._seen = 0

    def sequences_read(self, samples: int, length: int) -> int:
        """How many sequences the sample has."""
        return min(self.sequences, max(1, SAMPLE_TOKENS // length), samples)

    @contextmanager
    def observe(self, work: LayerWork) -> Iterator[None]:
        """Keep evenly spaced sequences of the layer's input; for a visual cache, of those that have images."""
        candidates = list(range(work.num_samples))
        span = work.cache.span
        if span is not None and span.modality == "visual" and work.visual is not None and work.visual.any():
            candidates = work.visual.any(1).nonzero().flatten().tolist()
        wanted = self.sequences_read(len(candidates), work.seq_len)
        self._chosen = [candidates[i * len(candidates) // wanted] for i in range(wanted)]
        self._seen = work.first_sample

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, first = args[0], self._seen
            self._seen += len(hidden)
            self._inputs += [
                (hidden[i - first : i - first + 1].clone(), kwargs) for i in self._chosen if first <= i < self._seen
            ]

        handle = work.layer.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def solve(self, work: LayerWork) -> None:
        """Run the inputs that this and other ranks kept through the layer as it is now."""
        self._gather(work)
        captured: list[tuple[Tensor, Tensor, Tensor]] = []
        attention = work.layer.get_submodule(work.structure.attention)
        observed = attention_observed(attention, lambda q, k, v: captured.append((q, k, v)))
        with observed, attention_arguments(attention) as found:
            for hidden, arguments in self._inputs:
                work.layer(hidden, **arguments)
        queries, keys, values = (torch.cat(parts) for parts in zip(*captured, strict=True))
        require_finite({"queries": queries, "keys": keys, "values": values}, "inputs", work)
        masks = [arguments.get("attention_mask") for _, arguments in self._inputs]
        weight = work.layer.get_submodule(work.structure.output).weight
        if work.cache.rotations.values:
            weight = hadamard_transform(weight.unflatten(1, (-1, values.shape[3]))).flatten(1)
        self.sample = AttentionSample(
            *as_cached(queries, keys, values, work.cache),
            scaling=found.get("scaling", queries.shape[3] ** -0.5),
            visible=_visible(masks, queries),
            output_weight=weight,
            visual=None if work.visual is None else work.visual[self._chosen].to(queries.device),
            softcap=found.get("softcap"),
            sink_logits=None if found.get("s_aux") is None else found["s_aux"].float(),
        )
        self.position_embeddings = self._inputs[0][1].get("position_embeddings")
        self._inputs.clear()

    def _gather(self, work: LayerWork) -> None:
        self._inputs = work.ranks.gather_list(self._inputs)
        for i, ((_, previous), (hidden, arguments)) in enumerate(pairwise(self._inputs), 1):
            if same_arguments(previous, arguments):  # equal ones are one object, as they were before they were sent
                self._inputs[i] = hidden, self._inputs[i - 1][1]


class SampleReader(CalibrationPass):
    """A pass that evaluates candidates on a sample of the finished layer's attention.

    Args:
        sampler: takes the sample, earlier in the list of passes.
    """

    reads_sample = True

    def __init__(self, sampler: AttentionSampler) -> None:
        self.sampler = sampler

    def sequences_read(self, samples: int, length: int) -> int:
        """Those of the sample."""
        return self.sampler.sequences_read(samples, length)


def _visible(masks: list[Tensor | None], queries: Tensor) -> Tensor:
    """The masks [1, 1, T, T] of sequences with queries [n, Hq, T, D], None being causal: bool [T, T] or [n, T, T]."""
    alone = causal(queries.shape[2], queries.device)
    if all(mask is masks[0] for mask in masks):
        return alone if masks[0] is None else masks[0][0, 0].bool()
    return torch.stack([alone if mask is None else mask[0, 0].bool() for mask in masks])
