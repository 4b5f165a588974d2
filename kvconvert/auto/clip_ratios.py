"""What a layer's candidates are measured with, chosen as calibration chooses it: clip ratios and error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from kvconvert.auto.layers import SearchedLayer
from kvconvert.calibration.attention_sample import AttentionSample, as_cached, causal
from kvconvert.calibration.clip_ratios import key_clip_ratio_errors, pages_read, value_clip_ratio_errors
from kvconvert.calibration.error_feedback import QueryMoments, feedback_matrices
from kvconvert.calibration.simulated_attention import AttentionCall
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.methods.auto import Candidate

# Calibration refines the ratio of what is chosen on its own grid, on the finished weights.
GRID = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


def candidate_clip_ratios(
    layer: SearchedLayer,
    call: AttentionCall,
    output_weight: Tensor | None,
    sides: Mapping[str, bool],
    key_feedback: Tensor | None,
) -> dict[str, float]:
    """The best clip ratio of every candidate that quantizes, by name; empty where the sequences fill no page.

    Args:
        layer: its candidates.
        call: the layer's attention on calibration sequences.
        output_weight: [hidden, Hq * E], see `AttentionSample`, or None.
        sides: whether the ratio of "key" and of "value" is to be chosen; the other one stays the recipe's.
        key_feedback: of `candidate_feedback`.
    """
    cache = layer.cache(layer.keys[0], layer.values[0])
    if not pages_read(call.keys.shape[2], cache.sink_tokens, 0, cache.pages.keys.page_size):
        return {}
    sample = _sample(call, output_weight, layer)
    found: dict[str, float] = {}
    known: dict[tuple[str, tuple[object, ...]], float] = {}
    for candidate in layer.candidates:
        if candidate.exact or not sides[candidate.side]:
            continue
        alone = _without_window(candidate)
        key = (candidate.side, tuple(alone.fields.items()))
        if key not in known:
            errors = key_clip_ratio_errors if candidate.side == "key" else value_clip_ratio_errors
            known[key] = GRID[int(errors(sample, layer.cache(alone, key_feedback=key_feedback), GRID).argmin())]
        found[candidate.name] = known[key]
    return found


def candidate_feedback(layer: SearchedLayer, call: AttentionCall) -> Tensor | None:
    """The matrices with which the layer's narrow keys are rounded, float16 [H, D, D]; None where all go to nearest."""
    if not any(layer.feeds_errors_back(candidate) for candidate in layer.keys):
        return None
    cache = layer.cache(layer.keys[0], layer.values[0])
    moments = QueryMoments()
    moments.update(as_cached(call.queries, call.keys, call.values, cache)[0], layer.heads)
    return feedback_matrices(moments.result())[0].half()


def _sample(call: AttentionCall, output_weight: Tensor | None, layer: SearchedLayer) -> AttentionSample:
    """Attention in the coordinates of the caches that quantize."""
    cache = layer.cache(layer.keys[0], layer.values[0])
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
