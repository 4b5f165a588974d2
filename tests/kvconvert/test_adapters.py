"""Every family's names are right if folding and scaling through them leave the model's function unchanged."""

import copy

import pytest
import torch
from tiny_checkpoints import tiny_model
from transformers import GPTNeoXConfig, LlamaConfig, LlamaForCausalLM

from kvconvert.adapters import ADAPTERS, find_adapter, require_adapter
from kvconvert.calibration.activations import ActivationRecorder
from kvconvert.calibration.awq import apply_scales, search_scales
from kvconvert.calibration.oscar import fold_value_rotation
from kvconvert.errors import UnsupportedModelError

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


def transformed(model, ids, fold, dtype=torch.float32):
    """A copy of the model, folded and then scaled layer by layer, and the ratios that were chosen."""
    model = copy.deepcopy(model)
    structure = require_adapter(model.config).structure(model.config, 0)
    recorders = []
    for layer in model.model.layers:
        if fold:
            fold_value_rotation(layer, structure)
        recorders.append(ActivationRecorder(structure, *ids.shape, 16))
    with torch.no_grad():
        hooks = [recorder.attached(layer) for recorder, layer in zip(recorders, model.model.layers, strict=True)]
        for hook in hooks:
            hook.__enter__()
        for sequence in ids.split(1):
            model(sequence, use_cache=False)
        for hook in hooks:
            hook.__exit__(None, None, None)
    ratios = []
    for layer, recorder in zip(model.model.layers, recorders, strict=True):
        scalings, _ = search_scales(layer, structure, recorder.result(), 3, 16, dtype=dtype)
        apply_scales(layer, structure, scalings, dtype)
        ratios += [scaling.ratio for scaling in scalings]
    return model, ratios


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "head_dim", "extra"),
    CASES,
    ids=[f"{c[0]}-{c[1]}q{c[2]}kv-d{c[3]}{''.join('-' + k for k in c[4])}" for c in CASES],
)
def test_fold_and_scaling_preserve_logits(family, heads, kv_heads, head_dim, extra):
    model = tiny_model(family, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, **extra)
    ids = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(1))
    changed, ratios = transformed(model, ids, fold=True)
    with torch.no_grad():
        expected, found = model(ids).logits, changed(ids).logits
    assert any(ratio > 0 for ratio in ratios)
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


def test_an_unknown_architecture_is_refused_with_what_is_missing():
    config = GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"])
    assert find_adapter(config) is None
    with pytest.raises(UnsupportedModelError, match=r"GPTNeoXForCausalLM.*which Linears read each norm"):
        require_adapter(config)


def test_a_model_that_is_not_a_causal_language_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="LlamaForSequenceClassification"):
        require_adapter(LlamaConfig(architectures=["LlamaForSequenceClassification"]))


def test_a_linear_without_a_name_is_reported_not_passed_over():
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_model("llama").config)
        model.model.layers[1].mlp.extra_proj = torch.nn.Linear(64, 64)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 has a Linear mlp\.extra_proj"):
        ADAPTERS["llama"].check(model)


def test_a_matrix_that_is_no_linear_is_reported_not_passed_over():
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_model("llama").config)
        model.model.layers[0].mlp.experts = torch.nn.Parameter(torch.empty(4, 64, 64))
    with pytest.raises(UnsupportedModelError, match=r"layer 0 has a weight mlp\.experts"):
        ADAPTERS["llama"].check(model)
