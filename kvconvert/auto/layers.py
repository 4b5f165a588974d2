"""The layers that a search chooses for: which candidates each may take, what they cost, and what they are fitted with
(treatments of keys, error feedback and clip ratios, chosen as calibration chooses them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from kvconvert.cache import LayerCache, layer_format
from kvconvert.calibration.attention_sample import AttentionSample, as_cached, causal
from kvconvert.calibration.keys import TreatmentSearch, measure_constant_part
from kvconvert.calibration.protocol import LayerJob
from kvconvert.calibration.scales import key_clip_ratio_errors, pages_read, value_clip_ratio_errors
from kvconvert.calibration.simulated_attention import AttentionCall
from kvconvert.errors import RecipeError
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.methods import KVCalibration, KVScheme
from kvconvert.methods.auto import KEY_CANDIDATES, VALUE_CANDIDATES, WINDOW_FIELDS, Candidate, stores_keys
from kvconvert.methods.keys import treatments
from kvconvert.models.configuration import sliding_windows


@dataclass(frozen=True, eq=False)
class SearchedLayer:
    """One layer and its choices.

    Attributes:
        index: the layer's index.
        scheme: the recipe's, resolved for the layer, with values rotated at run time: nothing is folded yet.
        search: what calibration chooses for every candidate.
        heads, key_dim, value_dim: KV heads, and channels of a head's keys and values.
        keys, values: candidates, those without any quantization last.
        costs: bytes of each candidate, summed over `lengths(context)`, by name.
        context: tokens of the sequence that costs are stated for.
        sliding_window: the layer's sliding window, or None.
        output: name of its output projection, or None where it is unknown.
    """

    index: int
    scheme: KVScheme
    search: KVCalibration
    heads: int
    key_dim: int
    value_dim: int
    keys: tuple[Candidate, ...]
    values: tuple[Candidate, ...]
    costs: Mapping[str, int]
    context: int = 0
    sliding_window: int | None = None
    output: str | None = None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates of both sides."""
        return self.keys + self.values

    def scheme_of(self, *candidates: Candidate) -> KVScheme:
        """The scheme with these candidates; a side without one stays in full precision."""
        chosen = {candidate.side: candidate for candidate in (self.keys[-1], self.values[-1], *candidates)}
        return replace(self.scheme, **chosen["key"].fields, **chosen["value"].fields)

    def formats(self, scheme: KVScheme) -> LayerFormat:
        """A scheme in the terms of kernels, without what calibration makes."""
        return layer_format(scheme.uncalibrated(), heads=self.heads, key_dim=self.key_dim, value_dim=self.value_dim)

    def cache(
        self,
        *candidates: Candidate,
        clip_ratios: Mapping[str, float] | None = None,
        measured: TreatmentSearch | None = None,
    ) -> LayerFormat:
        """The cache of these candidates; a side without one stays in full precision.

        Args:
            candidates: the candidates of one side or both.
            clip_ratios: by candidate's name; the scheme's own without one.
            measured: makes error feedback and constant parts of keys; None for a cache without.
        """
        found = {
            f"{candidate.side}_clip_ratio": ratio
            for candidate in candidates
            if (ratio := (clip_ratios or {}).get(candidate.name)) is not None
        }
        scheme = replace(self.scheme_of(*candidates), **found)
        return self.formats(scheme) if measured is None else measured.format_of(scheme)

    def treated(self, treatments: Mapping[str, Mapping[str, Any]]) -> SearchedLayer:
        """The layer with keys treated so, by candidate's name."""
        keys = tuple(replace(c, fields=c.fields | dict(treatments.get(c.name, {}))) for c in self.keys)
        costs = {c.name: self.cost_of(c) for c in keys if c.name in treatments}
        return replace(self, keys=keys, costs={**self.costs, **costs})

    def windowed(self, tokens: int) -> SearchedLayer:
        """The layer with that number of newest keys and values in full precision, whatever is chosen."""
        layer = replace(self, scheme=replace(self.scheme, **dict.fromkeys(WINDOW_FIELDS, tokens)))
        return replace(layer, costs={candidate.name: layer.cost_of(candidate) for candidate in layer.candidates})

    def cost_of(self, candidate: Candidate) -> int:
        """Bytes of a candidate, summed over `lengths(context)`."""
        own = self.scheme_of(candidate).uncalibrated()
        return self.cache_of(own).summed_sides(self.context)[0 if candidate.side == "key" else 1]

    def cache_of(self, scheme: KVScheme | None) -> LayerCache:
        """The layer's cache with a scheme, as bytes are counted."""
        return LayerCache(self.heads, self.key_dim, self.value_dim, scheme, self.sliding_window)

    def pairs(self) -> list[tuple[Candidate, Candidate]]:
        """Every way to store keys with every way to store values."""
        return [(key, value) for key in self.keys for value in self.values]


def searched_layers(config: PretrainedConfig, jobs: Sequence[LayerJob], context: int) -> list[SearchedLayer]:
    """The layers whose cache the recipe quantizes, without costs, which `SearchedLayer.windowed` computes.

    Args:
        config: the configuration of the language model.
        jobs: the jobs of all layers; candidates are laid over their schemes.
        context: tokens of the sequence that costs are stated for.
    """
    windows = sliding_windows(config)
    layers = []
    for job, window in zip(jobs, windows, strict=True):
        if job.scheme is None or job.is_latent:
            continue
        every = (KEY_CANDIDATES, VALUE_CANDIDATES)
        output = None if job.structure is None else job.structure.output
        plain = SearchedLayer(
            job.index,
            job.scheme.with_online_rotation(),
            job.search,
            job.heads,
            job.key_dim,
            job.value_dim,
            *every,
            {},
            context,
            window,
            output,
        )
        sides: dict[str, dict[object, Candidate]] = {"key": {}, "value": {}}
        for candidate in plain.candidates:
            try:
                pages = plain.formats(plain.scheme_of(candidate))
            except RecipeError:  # the head size cannot be packed so
                continue
            # Groups that are larger than the head are the head's.
            meaning = pages.keys if candidate.side == "key" else pages.values
            if meaning not in sides[candidate.side]:
                sides[candidate.side][meaning] = candidate
        keys, values = (tuple(found.values()) for found in sides.values())
        layers.append(replace(plain, keys=keys, values=values))
    return layers


# Calibration refines the ratio of what is chosen on its own grid, on the finished weights.
GRID = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


def measured_layer(
    layer: SearchedLayer,
    call: AttentionCall,
    output_weight: Tensor | None,
    embeddings: object,
    changing_rope: str | None,
) -> TreatmentSearch:
    """Measurements that every candidate of a layer is fitted with.

    Args:
        layer: its scheme and candidates.
        call: the layer's attention on calibration sequences.
        output_weight: [hidden, Hq * E], see `AttentionSample`; None where the layer's structure is unknown, so that
            calibration can fit neither feedback nor a constant part.
        embeddings: what the layer got as `position_embeddings`.
        changing_rope: see `LayerWork`.
    """
    search, constant = layer.search, "the structure of this model's layers is unknown"
    if output_weight is None:
        search = replace(search, calibrate_key_rounding=False, calibrate_keys=False)
    else:
        constant = measure_constant_part(call.keys, embeddings, layer.scheme.sink_tokens, changing_rope)
    return TreatmentSearch(_sample(call, output_weight, layer), False, constant, search)


def candidate_treatments(layer: SearchedLayer, measured: TreatmentSearch) -> dict[str, dict[str, Any]]:
    """The best treatment's fields for every candidate that quantizes keys, by name; empty where none is to be chosen.

    Candidates of equal bits are treated alike; boosted channels are those of keys that are not rotated.
    """
    sample = measured.sample(False)
    found: dict[str, dict[str, Any]] = {}
    known: dict[tuple[int, bool], dict[str, Any]] = {}
    for candidate in layer.keys:
        scheme = layer.scheme_of(candidate)
        if candidate.exact or not measured.search.chooses_treatment(scheme):
            continue
        if not pages_read(sample.num_tokens, 0, scheme.page_size):
            continue
        key = (scheme.keys.bits, scheme.boost_fraction > 0)
        if key not in known:
            choices = treatments(scheme, layer.key_dim)
            if scheme.boost_fraction:
                choices = [choice for choice in choices if choice.fields["rotate_keys"] == "none"]
            # What replaces widths is a candidate of its own.
            choices = [choice for choice in choices if not stores_keys(choice.fields)]
            known[key] = dict(measured.best(scheme, choices)[0].fields)
        found[candidate.name] = known[key]
    return found


def candidate_clip_ratios(
    layer: SearchedLayer, measured: TreatmentSearch, sides: Mapping[str, bool]
) -> dict[str, float]:
    """The best clip ratio of every candidate that quantizes, by name; empty where the sequences fill no page.

    Args:
        layer: its candidates, treated as they will be.
        measured: the result of `measured_layer`.
        sides: whether the ratio of "key" and of "value" is to be chosen; the other one stays the recipe's.
    """
    scheme = layer.scheme
    if not pages_read(measured.sample(False).num_tokens, 0, scheme.page_size):
        return {}
    found: dict[str, float] = {}
    known: dict[tuple[str, tuple[object, ...]], float] = {}
    for candidate in layer.candidates:
        if candidate.exact or not sides[candidate.side]:
            continue
        key = (candidate.side, tuple(candidate.fields.items()))
        if key not in known:
            errors = key_clip_ratio_errors if candidate.side == "key" else value_clip_ratio_errors
            cache = layer.cache(candidate, measured=measured)
            known[key] = GRID[int(errors(measured.sample(cache.rotations.keys), cache, GRID).argmin())]
        found[candidate.name] = known[key]
    return found


def _sample(call: AttentionCall, output_weight: Tensor | None, layer: SearchedLayer) -> AttentionSample:
    """Attention with keys as the model computes them, and values in the coordinates of the cache."""
    cache = layer.formats(layer.scheme)
    cache = replace(cache, rotations=cache.rotations._replace(keys=False))
    queries, keys, values = as_cached(call.queries, call.keys, call.values, cache)
    if output_weight is not None:
        output_weight = output_weight.float()
        if cache.rotations.values:
            output_weight = hadamard_transform(output_weight.unflatten(1, (-1, values.shape[3]))).flatten(1)
    mask, sinks = call.mask, call.arguments.get("s_aux")
    visible = causal(keys.shape[2], keys.device) if mask is None else mask[:, 0].bool()
    return AttentionSample(
        queries,
        keys,
        values,
        scaling=call.arguments.get("scaling") or queries.shape[3] ** -0.5,
        visible=visible[0] if visible.dim() == 3 and len(visible) == 1 else visible,
        output_weight=output_weight,
        softcap=call.arguments.get("softcap"),
        sink_logits=None if sinks is None else sinks.float(),
    )
