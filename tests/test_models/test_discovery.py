"""The structure of a layer is found by running it: what was written down by hand for 73 architectures is the oracle."""

import json
from pathlib import Path

import pytest
import torch
from tiny.models import ARCHITECTURES
from tiny.structures import architecture_of
from torch import nn
from transformers import GPT2Config, LlamaConfig

from kvconvert.convert.discovery import Architecture, discover
from kvconvert.convert.discovery.finder import projection
from kvconvert.convert.layer_runner import build_without_weights
from kvconvert.errors import UnsupportedModelError
from kvconvert.models.structure import LayerStructure, Projection

# Of each distinct layer: groups [norm, readers, inspected, (1 + weight), may be scaled], pairs [projection, down, may
# be scaled], and so on, of expert 0 alone where there are experts; written down from transformers' code.
ORACLE = json.loads(Path(__file__).with_name("structures.json").read_text("utf-8"))
# Where discovery knows better than what was written down, with the fields that differ.
BETTER = {
    # The gate's rows lie between the queries' rows of one Linear.
    "qwen3_next": ("query",),
    "qwen3_5_text": ("query",),
    "qwen3_5_moe_text": ("query",),
}


def rows(part: Projection | None, layer: nn.Module) -> tuple[str, list[int]] | None:
    if part is None:
        return None
    return part.linear, part.rows(torch.arange(layer.get_submodule(part.linear).out_features)).tolist()


def written(part: list | None) -> Projection | None:
    return None if part is None else Projection(part[0], tuple(part[1]), *part[2:4])


def first(names: tuple[str, ...], structure: LayerStructure) -> list[str]:
    owner = structure.experts.owner if structure.experts is not None else lambda name: None
    return sorted(name for name in names if not owner(name))


def described(structure: LayerStructure, layer: nn.Module) -> dict:
    experts = structure.experts
    return {
        "attention": structure.attention,
        "output": structure.output,
        "shape": [structure.num_attention_heads, structure.num_key_value_heads, structure.head_dim],
        "query": rows(structure.query, layer),
        "key": rows(structure.key, layer),
        "value": rows(structure.value, layer),
        "groups": [
            [g.norm, first(g.readers, structure), sorted(g.inspected), g.unit_offset, g.unsupported_reason is None]
            for g in structure.norm_groups
        ],
        "pairs": [
            [rows(p.up, layer), p.down, p.unsupported_reason is None]
            for p in structure.pairs
            if first((p.down,), structure)
        ],
        "folds": structure.fold_unsupported_reason is None,
        "scales": structure.value_scaling_unsupported_reason is None,
        "kept": sorted(structure.unquantized),
        "experts": None if experts is None else [experts.module, experts.count, experts.gate, experts.up, experts.down],
        "writers": list(structure.writers),
    }


@pytest.mark.quick(
    "gemma4_", "gpt_oss", "deepseek_v2", "opt", "gpt_neox", "qwen3_next", "lfm2", "bamba", "phi3", "olmo2"
)
@pytest.mark.parametrize("name", ORACLE)
def test_what_is_found_is_what_was_written_down_by_hand(name):
    model, oracle = build_without_weights(ARCHITECTURES[name].config()), ORACLE[name]
    architecture = discover(model)
    assert (architecture.base, architecture.layers) == (oracle["base"], oracle["layers"])
    differing = set()
    for kind in oracle["kinds"]:
        for index in kind["indices"]:
            layer = model.get_submodule(f"{architecture.layers}.{index}")
            expected = {key: value for key, value in kind.items() if key != "indices"}
            for part in ("query", "key", "value"):
                expected[part] = rows(written(expected[part]), layer)
            expected["pairs"] = [[rows(written(pair), layer), *pair[4:]] for pair in expected["pairs"]]
            actual = described(architecture.structures[index], layer)
            differing |= {field for field in BETTER.get(name, ()) if actual.pop(field) != expected.pop(field)}
            assert actual == expected
    assert differing == {*BETTER.get(name, ())}
    every_matrix_is_named(model, architecture)


def every_matrix_is_named(model: nn.Module, architecture: Architecture) -> None:
    """Every Linear is quantized or kept for a reason."""
    for layer, structure in zip(model.get_submodule(architecture.layers), architecture.structures, strict=True):
        matrices = {
            path
            for path, module in layer.named_modules()
            if isinstance(module, nn.Linear | nn.Conv1d) or getattr(getattr(module, "weight", None), "ndim", 0) > 1
        }
        assert matrices <= {*structure.named}
        assert all(isinstance(layer.get_submodule(path), nn.Linear) for path in structure.linears)


@pytest.mark.parametrize("name", ["jamba", "falcon_h1"])
def test_architectures_that_nobody_wrote_down_are_found_too(name):
    model = build_without_weights(ARCHITECTURES[name].config())
    architecture = discover(model)
    structures = architecture.structures
    every_matrix_is_named(model, architecture)
    assert all(any(group.unsupported_reason is None for group in structure.norm_groups) for structure in structures)
    assert any(structure.value is not None for structure in structures)


def test_a_clamp_of_values_keeps_scales_and_rotations_out():
    structure = architecture_of(ARCHITECTURES["olmo"].config(clip_qkv=8.0)).structures[0]
    assert structure.value_scaling_unsupported_reason is not None
    assert structure.fold_unsupported_reason is not None
    assert architecture_of(ARCHITECTURES["olmo"].config()).structures[0].fold_unsupported_reason is None


def test_a_reader_of_the_norm_that_no_scale_reaches_keeps_the_norm_as_it_is(monkeypatch):
    model = build_without_weights(ARCHITECTURES["llama"].config())
    mlp = type(model.model.layers[0].mlp)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + 0.1 * x.square()

    monkeypatch.setattr(mlp, "forward", forward)
    first, second = discover(model).structures[0].norm_groups
    assert first.unsupported_reason is None
    assert second.unsupported_reason == "a scale of the norm changes what the layer computes"


def test_a_linear_whose_weight_is_used_without_calling_it_is_kept(monkeypatch):
    model = build_without_weights(ARCHITECTURES["llama"].config())

    def forward(self, x):
        up = nn.functional.linear(x, self.up_proj.weight)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)

    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", forward)
    structure = discover(model).structures[0]
    assert structure.unquantized == {"mlp.up_proj": "its weight is used otherwise than by calling it"}
    assert structure.norm_groups[1].unsupported_reason is not None


def test_layers_with_a_linear_of_unknown_use_still_have_it_quantized_and_listed():
    model = build_without_weights(ARCHITECTURES["gpt_neox"].config(use_parallel_residual=False))
    structure = discover(model).structures[0]
    assert set(structure.linears) == {
        name for name, m in model.gpt_neox.layers[0].named_modules() if isinstance(m, nn.Linear)
    }


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 1, 1], Projection("x")),
        ([0, 0, 1, 1], Projection("x", (1, 1), 1)),
        ([1, 0, 1, 0], Projection("x", (1, 1), 0, 2)),
        ([0, 1, 1, 0, 0, 1, 1, 0], Projection("x", (1, 2, 1), 1, 2)),
        ([1, 0, 0, 1], None),
        ([1, 1, 0, 1], None),
    ],
)
def test_rows_of_a_fused_linear_become_blocks(mask, expected):
    assert projection("x", torch.tensor(mask, dtype=torch.bool)) == expected


def test_a_model_that_is_not_a_causal_language_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="LlamaForSequenceClassification"):
        architecture_of(LlamaConfig(architectures=["LlamaForSequenceClassification"], num_hidden_layers=1))


PUBLISHED = [("llama", "LLaMAForCausalLM"), ("phimoe", "PhiMoEForCausalLM"), ("qwen3_5_text", "Qwen35ForCausalLM")]


@pytest.mark.parametrize(("model_type", "stated"), PUBLISHED)
def test_a_class_is_known_by_the_name_that_was_published_whatever_its_case(model_type, stated):
    assert architecture_of(ARCHITECTURES[model_type].config(architectures=[stated])).model_type == model_type


def test_layers_without_linears_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"transformer\.h\.0\.attn has no Linear"):
        architecture_of(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_found_does_not_depend_on_whether_the_caller_wants_gradients(mode):
    expected = discover(build_without_weights(ARCHITECTURES["llama"].config())).structures
    model = build_without_weights(ARCHITECTURES["llama"].config())
    with mode():
        assert discover(model).structures == expected
