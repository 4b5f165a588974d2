"""Everything that would be open to interpretation, as data for the manifest."""

from __future__ import annotations

from typing import Any

from kvconvert.bundle.manifest import LayerPlan


def conventions(layers: list[LayerPlan], weights_method: str) -> dict[str, Any]:
    """What a reader that shares no code with kvconvert has to know to compute the same numbers from this bundle."""
    known: dict[str, Any] = {}
    if weights_method != "none":
        known["weights"] = {
            "layout": "awq gemm: qweight [in, out/8], qzeros [in/group, out/8], scales [in/group, out]",
            "value": "w = (q - z) * s, q and z integers 0 to 15",
            "nibbles": "bits 4i to 4i+3 of the int32 in column c hold output channel 8c + [0,2,4,6,1,3,5,7][i]",
        }
    if any(layer.kv for layer in layers):
        known["kv"] = {
            "keys_stored": "after q/k norm, RoPE and rotation; in full precision until their page is complete",
            "quantizer": "scale = (max - min) / (2^bits - 1), code = round((x - min) / scale), x = code * scale + min; "
            "scale and min are float16, codes are computed from the stored float16 values; scale 0 gives code 0",
            "key_groups": "per channel, over key_group_size consecutive tokens of a page",
            "value_groups": "per token, over value_group_size consecutive channels of a head",
            "lanes": "int16; of N fields of w bits along the packed axis (tokens for keys, channels for values) lane l "
            "holds in its bits j*w to j*w+w-1 field j*L + l, with L = N*w/16",
            "fields": "a code of 2, 4 or 8 bits is a field of w = bits; codes of 1 bit are paired to fields of w = 2: "
            "of M rows across the packed axis (channels for keys, tokens for values, an odd number completed by zeros) "
            "bit 0 belongs to row i and bit 1 to row i + M/2",
            "range": "(min, max) shrink about their midpoint by key_clip_ratio and value_clip_ratio before scale is computed",
        }
    if any(layer.rotation for layer in layers):
        known["rotation"] = {
            "matrix": {str(layer.head_dim): layer.rotation for layer in layers if layer.rotation},
            "form": "row vectors, x' = x H with H orthonormal; queries and keys by the same H",
            "folded_values": "W_V of each KV head became W_V H (as row vectors), W_O of each query head H^T W_O",
        }
    if any(layer.kv and layer.kv["token_norm"] != "none" for layer in layers):
        known["token_norm"] = {
            "joint": "one norm over all KV heads and channels of a token",
            "per_head": "one norm for each KV head of a token",
            "l2": "root mean square",
            "mean_abs": "mean of magnitudes",
            "use": "taken after rotation when a page is quantized; keys are divided by it, scores multiplied; float16; "
            "a token of norm zero stores zeros",
        }
    if any(layer.kv and layer.kv["static_scales"] == "calibrated" for layer in layers):
        known["static_scales"] = {
            "place": "layers.{i}.static_key_scale, static_key_zero_point, static_value_scale and static_value_zero_point of "
            "the KV plan, float16 [KV heads, channels], ranges included; pages hold codes alone",
            "use": "x = code * scale + minimum for every token of the channel, keys after RoPE and rotation; codes are "
            "packed as elsewhere; numbers outside are clamped to the first or last code",
        }
    if any(layer.kv and layer.kv["boost_fraction"] for layer in layers):
        known["boost"] = {
            "count": "boosted channels of a head = round(boost_fraction * head_dim), halves to even",
            "dynamic": "of each page and head, those with the largest mean |k| over the page's tokens, after rotation "
            "and token norm; ties to the lower index",
            "calibrated": "layers.{i}.boosted_channels of the KV plan, per KV head",
            "code": "2 * key_bits bits on the channel's own grid: low half with everybody's codes, high half in a "
            "second plane of the boosted channels in ascending order",
        }
    if any(layer.kv and layer.kv["key_granularity"] == "span" for layer in layers):
        known["span"] = {
            "tokens": "a whole prompt after its sinks, per sequence; later tokens stay in full precision",
            "modality": "visual: of these only the tokens whose id is config.json's image_token_id or video_token_id "
            "(or image_token_index, video_token_index), audio: audio_token_id or audio_token_index; all others stay "
            "in full precision",
            "groups": "keys and values per channel over all tokens of the span",
            "tau": "a query's span scores x (after scaling) become (x - g) * max(0, 1 - (tau2 - tau1) / (d - g)) + g - "
            "tau1, g and d being their minimum and maximum over all spans; x - tau1 where d = g",
        }
    if any(layer.kv and layer.kv["heavy_ratio"] is not None for layer in layers):
        known["eviction"] = {
            "score": "attention that a token receives from all queries of the prompt, summed over the query heads of "
            "its KV head",
            "kept": "sinks, the newest round(recent_ratio * n) and, of the others, the round(heavy_ratio * n) with the "
            "highest score, ties to the older; n = the sequence's unpadded prompt, halves to even",
        }
    return known
