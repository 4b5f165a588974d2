"""The numbers behind the figures of a report."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tiny.bundle import tiny_manifest, tiny_tensors
from tiny.models import random_ids, tiny_model

from kvconvert import KVCache
from kvconvert.bundle.manifest import Allocation, LayerAllocation, LayerPlan
from kvconvert.cache import LayerCache, lengths
from kvconvert.io.records import DataInfo
from kvconvert.methods import KVScheme, spread_ratios
from kvconvert.methods.auto import KEY_CANDIDATES, VALUE_CANDIDATES
from kvconvert.models.configuration import model_cache
from kvconvert.report.data import (
    NotDrawnError,
    budgets,
    frontier,
    layer_widths,
    memory,
    module_sizes,
    sensitivity,
    tau_surfaces,
)

HEADS, CHANNELS, CONTEXT = 2, 16, 1000
NAMES = ("K2g128s8", "K4g128", "K16", "V2g128s8", "V16")
CANDIDATES = [c for c in (*KEY_CANDIDATES, *VALUE_CANDIDATES) if c.name in NAMES]


def config(layers=2, kind="llama", **others):
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": CHANNELS}
    return AutoConfig.for_model(kind, **sizes, num_hidden_layers=layers, **others)


def manifest_with(schemes):
    layers = [
        LayerPlan(
            index=i,
            kv=None if scheme is None else scheme.to_dict(),
            head_dim=None if scheme is None else CHANNELS,
            num_key_value_heads=None if scheme is None else HEADS,
            value_group_size=None if scheme is None else scheme.value_group_for(CHANNELS),
        )
        for i, scheme in enumerate(schemes)
    ]
    return tiny_manifest(tiny_tensors(), {}).model_copy(update={"layers": layers})


def size_of(candidate, base):
    scheme = KVScheme.from_dict(base.to_dict() | candidate.fields)
    return LayerCache(HEADS, CHANNELS, CHANNELS, scheme).summed_sides(CONTEXT)[0 if candidate.side == "key" else 1]


def bits(size):
    """Bits per value of two layers whose bytes over all lengths add up to `size`."""
    return 8 * size / (4 * HEADS * CHANNELS * sum(lengths(CONTEXT)))


def sizes(config, scheme):
    return model_cache(config, spread_ratios([scheme] * config.num_hidden_layers))


def searched_manifest(**changes):
    """Two layers with invented divergences."""
    base = KVScheme.preset("oscar-g128")
    kl = [
        {"K2g128s8": 0.03, "K4g128": 0.004, "K16": 0.0, "V2g128s8": 0.01, "V16": 0.0},
        {"K2g128s8": 0.2, "K4g128": 0.01, "K16": 0.0, "V2g128s8": 0.05, "V16": 0.0},
    ]
    chosen = [("K2g128s8", "V2g128s8"), ("K4g128", "V2g128s8")]
    size = sum(size_of(c, base) for names in chosen for c in CANDIDATES if c.name in names)
    fields = {
        "context": CONTEXT,
        "budget_bytes_per_token": size / CONTEXT,
        "bytes_per_token": size / CONTEXT,
        "bits_per_value": bits(size),
        "candidates": {c.name: c.fields for c in CANDIDATES},
        "layers": [
            LayerAllocation(index=i, keys=key, values=value, kl=kl[i], clip_ratios={})
            for i, (key, value) in enumerate(chosen)
        ],
        "predicted_kl": 0.1,
        "measured_kl": 0.09,
        "plans": 3,
        "data": DataInfo(source="text", samples=1, length=8, seed=0, sha256="0" * 64),
        "dtype": "float32",
    }
    schemes = [KVScheme.from_dict(base.to_dict() | {"key_bits": bits}) for bits in (2, 4)]
    allocation = Allocation(**fields | changes)
    return manifest_with(schemes).model_copy(
        update={"allocation": allocation, "recipe": {"name": "auto", "kv": base.to_dict()}}
    )


def test_a_token_norm_that_the_search_chose_for_a_layer_counts_in_its_sizes():
    normed = KVScheme.preset("oscar-g128")
    plain = KVScheme.from_dict(normed.to_dict() | {"token_norm": "none"})
    names = [("K2g128s8", "V2g128s8"), ("K4g128", "V2g128s8")]
    size = sum(
        size_of(c, base)
        for base, chosen in zip((plain, normed), names, strict=True)
        for c in CANDIDATES
        if c.name in chosen
    )
    found = searched_manifest(bits_per_value=bits(size))
    first, second = found.layers
    first = first.model_copy(update={"kv": first.kv | {"token_norm": "none"}})
    recipe = {"name": "auto", "kv": plain.to_dict()}
    drawn = frontier(found.model_copy(update={"layers": [first, second], "recipe": recipe}), config())
    assert drawn.chosen_bits == pytest.approx(bits(size), rel=1e-6)
    assert drawn.chosen_bits < frontier(searched_manifest(), config()).chosen_bits


def test_the_frontier_has_no_plan_below_it():
    manifest = searched_manifest()
    found = frontier(manifest, config())
    base = KVScheme.from_dict(manifest.recipe["kv"])
    cost = {c.name: size_of(c, base) for c in CANDIDATES}
    keys, values = (
        [c.name for c in CANDIDATES if c.side == side and not c.exact] + [f"{side[0].upper()}16"]
        for side in ("key", "value")
    )
    plans = []
    for names in product(keys, values, keys, values):
        pairs = [(names[0], names[1]), (names[2], names[3])]
        layers = manifest.allocation.layers
        loss = sum(layer.kl[name] for layer, pair in zip(layers, pairs, strict=True) for name in pair)
        plans.append((bits(sum(cost[name] for name in names)), loss))
    for point, kl in zip(found.bits, found.kl, strict=True):
        assert any((point, kl) == pytest.approx(plan) for plan in plans)
        assert kl == pytest.approx(min(loss for size, loss in plans if size <= point * (1 + 1e-9)))
    assert list(found.kl) == sorted(found.kl, reverse=True)
    assert found.predicted_kl == pytest.approx(0.03 + 0.01 + 0.01 + 0.05)
    assert (found.chosen_bits, found.measured_kl) == (pytest.approx(manifest.allocation.bits_per_value), 0.09)
    assert len(found.uniform_bits) == 5  # of six plans, without the one that has no loss


@pytest.mark.parametrize(
    "changes",
    [
        {"bits_per_value": 1.0},
        {"candidates": {"K2g128s8": {"key_bits": "many"}}},
        {"layers": [LayerAllocation(index=99, keys="K16", values="V16", kl={"K16": 1.0}, clip_ratios={})]},
        {"layers": [LayerAllocation(index=0, keys="K16", values="V16", kl={"K2g128s8": 1.0}, clip_ratios={})]},
    ],
    ids=["size", "candidate", "layer", "choice"],
)
def test_an_allocation_that_contradicts_itself_gives_no_frontier(changes):
    with pytest.raises(NotDrawnError):
        frontier(searched_manifest(**changes), config())


def test_sensitivity_leaves_out_what_changes_nothing_and_marks_what_was_chosen():
    found = sensitivity(searched_manifest().allocation)
    assert found.candidates == ("K2g128s8", "K4g128", "V2g128s8")
    assert found.key_candidates == 2
    assert found.chosen.tolist() == [[True, False, True], [False, True, True]]
    assert found.kl[1].tolist() == [0.2, 0.01, 0.05]
    assert found.largest() == (1, 0.2)


@pytest.mark.parametrize(
    "preset",
    [
        "oscar-g128",
        "minikv-pyramid",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("kivi", "calibquant-2bit", "calibquant-2bit-paper")),
    ],
)
def test_memory_is_what_a_cache_holds_after_a_prompt(preset):
    tokens, scheme = 700, KVScheme.preset(preset).with_online_rotation()
    model = tiny_model("llama", attention="kvconvert").to(torch.bfloat16)
    own = model.config
    layers = own.num_hidden_layers
    cache = KVCache(own, scheme)
    with torch.no_grad():
        model(random_ids(1, tokens), past_key_values=cache, logits_to_keep=1)
    if scheme.compresses_prompts():
        cache.seal()
    channels = own.head_dim
    plans = [
        LayerPlan(index=i, kv=scheme.to_dict(), head_dim=channels, num_key_value_heads=own.num_key_value_heads,
                  value_group_size=scheme.value_group_for(channels))
        for i in range(layers)
    ]  # fmt: skip
    found, size = memory(manifest_with([]).model_copy(update={"layers": plans}), own, [tokens]), sizes(own, scheme)
    assert size.exact_bytes(tokens) == cache.stats().bytes_used
    assert found.bundle == (round(size.bytes(tokens)),)
    assert found.plain == (2 * layers * own.num_key_value_heads * channels * tokens * 2,)


def test_a_layer_without_keys_and_values_has_no_widths_of_them():
    from transformers import BambaConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": CHANNELS}
    own, kivi = BambaConfig(**sizes, num_hidden_layers=3, attn_layer_indices=[1, 2]), KVScheme.preset("kivi")
    assert layer_widths(manifest_with([None, kivi, kivi]), own) is None  # all alike
    found = layer_widths(manifest_with([None, kivi, None]), own)
    assert (found.layers, found.keys, found.values) == ((1, 2), (kivi.keys.bits, 16), (kivi.values.bits, 16))


def test_memory_of_layers_that_keep_their_own_cache_and_of_sliding_windows():
    windowed = config(kind="ministral", layer_types=["full_attention", "sliding_attention"], sliding_window=256)
    found = memory(manifest_with([None, None]), windowed, [1024])
    token = 2 * HEADS * CHANNELS * 2
    assert found.plain == found.bundle == ((1024 + 256) * token,)
    with pytest.raises(NotDrawnError, match="visual"):
        memory(manifest_with([KVScheme.preset("calibquant-2bit-visual")] * 2), config())


def test_a_pyramid_is_spread_over_the_layers():
    found = budgets(manifest_with([None, *[KVScheme.preset("minikv-pyramid")] * 3]))
    assert found.layers == (1, 2, 3)
    assert sum(found.heavy) == pytest.approx(3 * 0.25)
    assert found.heavy[0] > found.heavy[1] > found.heavy[2]
    assert budgets(manifest_with([KVScheme.preset("oscar")])) is None
    shared = replace(KVScheme.preset("minikv"), selection="predicted")
    assert budgets(manifest_with([shared] * 2)) is None, "layers share one, and keep what scores say"


def test_tau_surfaces_are_relative_to_no_shift():
    manifest = manifest_with([KVScheme.preset("calibquant-2bit-paper"), None])
    grid, error = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([[2.0, 4.0, 1.0]] * 3)
    plan = {"layers.0.tau_grid": grid, "layers.0.tau_error": error, "layers.1.tau_grid": grid}
    (found,) = tau_surfaces(manifest, plan)
    assert (found.layer, found.grid, found.chosen) == (0, (0.0, 1.0, 3.0), (0.0, 3.0))
    assert found.error.tolist() == [[1.0, 2.0, 0.5]] * 3
    assert not tau_surfaces(manifest, plan | {"layers.0.tau_error": error[:2]})


def test_modules_are_gathered_by_name_and_width():
    sizes = {each.name: each.parameters for each in module_sizes(tiny_manifest(tiny_tensors(), {}))}
    assert sizes == {"q_proj": {4: 2 * 32 * 32}, "down_proj": {4: 2 * 64 * 32}, "embed_tokens": {0: 24 * 32}}
