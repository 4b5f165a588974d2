"""What a layer's candidates are measured with, chosen as calibration chooses it: treatments of keys, error feedback and
clip ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvconvert.auto.layers import SearchedLayer
from kvconvert.calibration.attention_sample import AttentionSample, as_cached, causal
from kvconvert.calibration.clip_ratios import key_clip_ratio_errors, pages_read, value_clip_ratio_errors
from kvconvert.calibration.key_treatments import TreatmentSearch, measure_constant_part
from kvconvert.calibration.simulated_attention import AttentionCall
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.methods.auto import Candidate, stores_keys
from kvconvert.methods.key_treatments import treatments

# Calibration refines the ratio of what is chosen on its own grid, on the finished weights.
GRID = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


def measured_layer(
    layer: SearchedLayer,
    call: AttentionCall,
    output_weight: Tensor | None,
    embeddings: object,
    changing_rope: str | None,
) -> TreatmentSearch:
    """What every candidate of a layer is fitted with.

    Args:
        layer: its scheme and candidates.
        call: the layer's attention on calibration sequences.
        output_weight: [hidden, Hq * E], see `AttentionSample`; None where no adapter describes the layer, so that
            calibration can fit neither feedback nor a constant part.
        embeddings: what the layer got as `position_embeddings`.
        changing_rope: see `LayerWork`.
    """
    search, constant = layer.search, "no adapter describes this architecture's layers"
    if output_weight is None:
        search = replace(search, calibrate_key_rounding=False, calibrate_keys=False)
    else:
        constant = measure_constant_part(call.keys, embeddings, layer.scheme.sink_tokens, changing_rope)
    return TreatmentSearch(_sample(call, output_weight, layer), False, constant, search)


def candidate_treatments(layer: SearchedLayer, measured: TreatmentSearch) -> dict[str, dict[str, Any]]:
    """Of every candidate that quantizes keys the best treatment's fields, by name; empty where none is to be chosen.

    Candidates of equal bits are treated alike; boosted channels are those of keys that are not rotated.
    """
    sample = measured.sample(False)
    found: dict[str, dict[str, Any]] = {}
    known: dict[tuple[int, bool], dict[str, Any]] = {}
    for candidate in layer.keys:
        scheme = layer.scheme_of(_without_window(candidate))
        if candidate.exact or not measured.search.chooses_treatment(scheme):
            continue
        if not pages_read(sample.num_tokens, scheme.sink_tokens, 0, scheme.page_size):
            continue
        key = (scheme.keys.bits, scheme.boost_fraction > 0)
        if key not in known:
            choices = treatments(scheme, layer.head_dim)
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
        measured: of `measured_layer`.
        sides: whether the ratio of "key" and of "value" is to be chosen; the other one stays the recipe's.
    """
    scheme = layer.scheme
    if not pages_read(measured.sample(False).num_tokens, scheme.sink_tokens, 0, scheme.page_size):
        return {}
    found: dict[str, float] = {}
    known: dict[tuple[str, tuple[object, ...]], float] = {}
    for candidate in layer.candidates:
        if candidate.exact or not sides[candidate.side]:
            continue
        alone = _without_window(candidate)
        key = (candidate.side, tuple(alone.fields.items()))
        if key not in known:
            errors = key_clip_ratio_errors if candidate.side == "key" else value_clip_ratio_errors
            cache = layer.cache(alone, measured=measured)
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


def _without_window(candidate: Candidate) -> Candidate:
    return replace(candidate, fields=candidate.fields | {f"{candidate.side}_recent_tokens": 0})
