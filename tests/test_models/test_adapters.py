"""Every family's names are right if folding and scaling through them leave the model's function unchanged."""

import copy
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tiny.checkpoints import tiny_model
from tiny.models import ARCHITECTURES
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from kvconvert.calibration.activations import ActivationRecorder
from kvconvert.calibration.awq_scales import search_scales
from kvconvert.calibration.awq_scaling import apply_scales
from kvconvert.calibration.oscar import fold_value_rotation
from kvconvert.errors import UnsupportedModelError
from kvconvert.models.adapters import ADAPTERS, dense, find_adapter, require_adapter
from kvconvert.models.experts import ExpertRoles, separate_experts

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


TEXTS = [name for name, tiny in ARCHITECTURES.items() if not tiny.multimodal and find_adapter(tiny.config())]
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
    adapter = require_adapter(model.config)
    layers = model.get_submodule(adapter.layers)
    structures = [adapter.structure(model.config, index) for index in range(len(layers))]
    recorders = [ActivationRecorder(structure, *ids.shape, 16) for structure in structures]
    for layer, structure in zip(layers, structures, strict=True):
        if structure.experts is not None:
            experts = structure.experts
            separate_experts(layer, ExpertRoles(experts.gate, experts.up, experts.down))
        if fold and not structure.fold_unsupported_reason:
            fold_value_rotation(layer, structure)
    with torch.no_grad(), ExitStack() as hooks:
        for recorder, layer in zip(recorders, layers, strict=True):
            hooks.enter_context(recorder.attached(layer))
        for sequence in ids.split(1):
            model(sequence, use_cache=False)
    found = []
    for layer, structure, recorder in zip(layers, structures, recorders, strict=True):
        scalings, skipped = search_scales(layer, structure, recorder.result(), 3, 16, dtype=dtype)
        apply_scales(layer, structure, scalings, dtype)
        found.append((structure, scalings, skipped))
    return model, found


def random_ids():
    return torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "changes"), MODELS, ids=["-".join((n, *c)) for n, c in MODELS])
def test_every_shape_of_layers_computes_the_same_after_folding_and_scaling(name, changes):
    model = ARCHITECTURES[name].build(**changes)
    changed, found = transformed(model, random_ids(), fold=True)
    with torch.no_grad():
        expected, logits = model(random_ids()).logits, changed(random_ids()).logits
    # 1e-4 is what the project promises; float32 rounding through two layers gives about 1e-6.
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    require_adapter(model.config).check(changed)
    assert any(scaling.ratio > 0 for _, scalings, _ in found for scaling in scalings)
    for structure, scalings, skipped in found:
        values = structure.value is not None or structure.value_scaling_unsupported_reason is not None
        assert len(scalings) + len(skipped) >= len(structure.norm_groups) + len(structure.pairs) + values
    # Whatever says that it may be rotated has been.
    adapter = require_adapter(model.config)
    for index, (structure, *_) in enumerate(found):
        if structure.value is not None and structure.fold_unsupported_reason is None:
            before, after = (m.get_submodule(f"{adapter.layers}.{index}.{structure.output}") for m in (model, changed))
            assert not torch.allclose(before.weight, after.weight)


@pytest.mark.parametrize("name", [name for name in TEXTS if "moe" not in ARCHITECTURES[name].features])
def test_every_linear_of_every_architecture_has_a_use_or_is_refused(name):
    with torch.device("meta"):
        model = ARCHITECTURES[name].build()
    adapter = require_adapter(model.config)
    adapter.check(model)
    layers = model.get_submodule(adapter.layers)
    layers[1].extra_proj = torch.nn.Linear(8, 8)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 has a Linear extra_proj"):
        adapter.check(model)
    del layers[1].extra_proj
    for index, layer in enumerate(layers):
        output = adapter.structure(model.config, index).output
        layer.set_submodule(output, torch.nn.Identity())
    with pytest.raises(UnsupportedModelError, match="is no Linear"):
        adapter.check(model)


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


def test_the_documented_example_is_the_entry_itself():
    document = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", document, re.DOTALL)[1]
    assert eval(example, vars(dense)) == ADAPTERS["phi"]


def test_an_unknown_architecture_is_refused_with_what_is_missing():
    config = GPT2Config(architectures=["GPT2LMHeadModel"])
    assert find_adapter(config) is None
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*which Linears read each norm"):
        require_adapter(config)


@pytest.mark.parametrize(("model_type", "stated"), [("llama", "LLaMAForCausalLM"), ("phimoe", "PhiMoEForCausalLM")])
def test_a_class_is_known_by_the_name_that_was_published_whatever_its_case(model_type, stated):
    config = ARCHITECTURES[model_type].config(architectures=[stated])
    assert require_adapter(config) is ADAPTERS[model_type]


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
