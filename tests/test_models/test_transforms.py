"""Every family's names are right if folding and scaling through them leave the model's function unchanged."""

import copy
from contextlib import ExitStack

import pytest
import torch
from tiny.checkpoints import tiny_model
from tiny.models import ARCHITECTURES
from tiny.structures import architecture_of, separated

from kvconvert.calibration.activations import ActivationRecorder
from kvconvert.calibration.awq_scales import search_scales
from kvconvert.calibration.awq_scaling import apply_scales
from kvconvert.calibration.oscar import fold_value_rotation

# Family, query heads, KV heads, head size, further configuration. Together they cover each family with grouped-query
# ratios 1, 2 and 4, all head sizes, and biases on and off.
CASES = [
    ("llama", 4, 4, 48, {}),
    ("llama", 4, 2, 64, {"attention_bias": True, "mlp_bias": True}),
    ("llama", 4, 1, 80, {"attention_bias": True}),
    ("llama", 4, 2, 128, {"mlp_bias": True}),
    ("mistral", 4, 1, 64, {"sliding_window": 8}),
    ("mistral", 2, 2, 128, {"sliding_window": None}),
    ("mistral", 4, 2, 80, {}),
    ("qwen2", 4, 2, 48, {}),
    ("qwen2", 4, 4, 80, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen2", 4, 1, 128, {}),
    ("qwen3", 2, 2, 48, {"attention_bias": True}),
    ("qwen3", 4, 1, 64, {}),
    ("qwen3", 4, 2, 128, {}),
]


# Shapes that configurations give to layers; the models of `tiny.models` as they are stand in the matrix of all tests.
MODELS = [
    ("stablelm", {"use_parallel_residual": True}),
    ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
    ("opt", {"activation_function": "gelu"}),
    ("opt", {"do_layer_norm_before": False}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("olmo", {"clip_qkv": 0.5}),
    ("cohere", {"use_qk_norm": True}),
    ("phi", {"qk_layernorm": True}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    ("starcoder2", {"use_bias": False}),
    ("gemma4_text_same_kv", {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] + ["full_attention"] * 2}),
    ("qwen3_next", {"mlp_only_layers": [0]}),
    ("granitemoehybrid", {"num_local_experts": 0}),
]


def transformed(model, ids, fold, dtype=torch.float32):
    """A copy of the model, folded and then scaled layer by layer, and every scaling or the reason for none."""
    model = copy.deepcopy(model)
    architecture = architecture_of(model.config)
    layers, structures = model.get_submodule(architecture.layers), architecture.structures
    separated(model, architecture)
    recorders = [ActivationRecorder(structure, *ids.shape, 16) for structure in structures]
    for layer, structure in zip(layers, structures, strict=True):
        if fold and not structure.fold_unsupported_reason:
            fold_value_rotation(layer, structure)
    with torch.no_grad(), ExitStack() as hooks:
        for recorder, layer in zip(recorders, layers, strict=True):
            hooks.enter_context(recorder.attached(layer))
        for sequence in ids.split(1):
            model(sequence, use_cache=False)
    results = []
    for layer, structure, recorder in zip(layers, structures, recorders, strict=True):
        scalings, skipped = search_scales(layer, structure, recorder.result(), 3, 16, dtype=dtype)
        apply_scales(layer, structure, scalings, dtype)
        results.append((structure, scalings, skipped))
    return model, results


def random_ids():
    return torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.quick("parallel_residual", "do_layer_norm", "clip_qkv", "qk_norm", "use_bias")
@pytest.mark.parametrize(("name", "changes"), MODELS, ids=["-".join((n, *c)) for n, c in MODELS])
def test_every_shape_of_layers_computes_the_same_after_folding_and_scaling(name, changes):
    model = ARCHITECTURES[name].build(**changes)
    changed, results = transformed(model, random_ids(), fold=True)
    with torch.no_grad():
        expected, logits = model(random_ids()).logits, changed(random_ids()).logits
    # 1e-4 is what the project promises; float32 rounding through two layers gives about 1e-6.
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert any(scaling.ratio > 0 for _, scalings, _ in results for scaling in scalings)
    for structure, scalings, skipped in results:
        values = structure.value is not None or structure.value_scaling_unsupported_reason is not None
        assert len(scalings) + len(skipped) >= len(structure.norm_groups) + len(structure.pairs) + values
    # Whatever says that it may be rotated has been.
    layers = architecture_of(model.config).layers
    for index, (structure, *_) in enumerate(results):
        if structure.value is not None and structure.fold_unsupported_reason is None:
            before, after = (m.get_submodule(f"{layers}.{index}.{structure.output}") for m in (model, changed))
            assert not torch.allclose(before.weight, after.weight)


@pytest.mark.quick("llama-4q2kv-d64", "llama-4q1kv-d80", "mistral-2q2kv", "qwen2-4q2kv-d48", "qwen3-4q2kv")
@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "head_dim", "extra"),
    CASES,
    ids=[f"{c[0]}-{c[1]}q{c[2]}kv-d{c[3]}{''.join('-' + k for k in c[4])}" for c in CASES],
)
def test_fold_and_scaling_preserve_logits(family, heads, kv_heads, head_dim, extra):
    model = tiny_model(family, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, **extra)
    ids = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(1))
    changed, layers = transformed(model, ids, fold=True)
    with torch.no_grad():
        expected, found = model(ids).logits, changed(ids).logits
    assert any(scaling.ratio > 0 for _, scalings, _ in layers for scaling in scalings)
    before, after = model.model.layers[0].self_attn, changed.model.layers[0].self_attn
    assert not torch.allclose(before.v_proj.weight, after.v_proj.weight)
    # 1e-4 is what the project promises; float32 rounding through two layers gives about 1e-6.
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_scaled_norms_are_exact_in_bfloat16_and_lose_nothing_by_it():
    model = tiny_model("llama").to(torch.bfloat16).float()
    ids = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(1))
    changed, _ = transformed(model, ids, fold=False, dtype=torch.bfloat16)
    for layer in changed.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            assert torch.equal(norm.weight, norm.weight.bfloat16().float())
    with torch.no_grad():
        expected, found = model(ids).logits, changed(ids).logits
    # Rounding the norms to bfloat16 (2^-9 relative) would show at 1e-3; it is absorbed by the weights.
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
