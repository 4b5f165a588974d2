"""How many tokens a model may attend over, for each kind of RoPE, in configurations of transformers 4 and 5."""

import json

import pytest
import torch
from transformers import AutoConfig, Gemma3TextConfig, GPT2Config, LlamaConfig, LlamaForCausalLM, Qwen2_5_VLConfig

from kvconvert.console import Console
from kvconvert.errors import BundleError
from kvconvert.models.configuration import context_length
from kvconvert.models.positions import stated_positions
from kvconvert.runtime import Engine, load

LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
KINDS = [
    ({}, 256),
    ({"rope_type": "default"}, 256),
    ({"rope_type": "yarn", "factor": 4.0}, 1024),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    # The positions hold what was trained for already.
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 256),
    ({"rope_type": "linear", "factor": 2.5}, 640),
    ({"rope_type": "dynamic", "factor": 2.0}, 512),
    ({"rope_type": "longrope", **LONG, "original_max_position_embeddings": 64, "factor": 4.0}, 256),
    (
        {
            "rope_type": "llama3",
            **{"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 64,
        },
        256,
    ),
]


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 1e308, 10**400, "x", [2.0]], ids=lambda f: str(f)[:9])
@pytest.mark.parametrize("field", ["factor", "original_max_position_embeddings"])
def test_a_factor_that_is_no_number_of_positions_is_refused(field, factor):
    config = LlamaConfig(max_position_embeddings=64)
    config.rope_parameters = {"rope_type": "yarn", "factor": 2.0} | {field: factor}
    for parameters in (config.rope_parameters, {"full_attention": config.rope_parameters}):
        config.rope_parameters = parameters
        with pytest.raises(BundleError, match=f"config.json .*{field} of a RoPE should be a number"):
            context_length(config)


@pytest.mark.parametrize(("rope", "expected"), KINDS, ids=str)
@pytest.mark.parametrize("version", [4, 5])
def test_a_scaled_rope_raises_the_context(rope, expected, version, tmp_path):
    config = {"model_type": "llama", "max_position_embeddings": 256, "hidden_size": 32, "num_attention_heads": 2}
    if version == 5:
        config["rope_parameters"] = {"rope_theta": 1e4} | rope
    else:
        config |= {"rope_theta": 1e4, "rope_scaling": rope or None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(AutoConfig.from_pretrained(tmp_path)) == expected
    assert stated_positions(tmp_path) == expected


def test_old_names_layers_of_several_kinds_and_models_without_rope():
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    assert context_length(LlamaConfig(max_position_embeddings=64, rope_scaling=yarn)) == 128
    gemma = Gemma3TextConfig(max_position_embeddings=512)
    gemma.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    assert context_length(gemma) == 512  # the layers with windows are not scaled
    assert context_length(GPT2Config(n_positions=96)) == 96
    assert context_length(Qwen2_5_VLConfig(text_config={"max_position_embeddings": 77})) == 77
    for none in (0, -1):
        config = LlamaConfig(max_position_embeddings=64)
        config.max_position_embeddings = none
        assert context_length(config) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"text_config": {"max_position_embeddings": 77}}', 77),
        ('{"n_positions": 96}', 96),
        ('{"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}', 512),
        ('{"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": "8"}}', None),
        ('{"max_position_embeddings": 64, "rope_scaling": 8}', 64),
        ('{"max_position_embeddings": "64"}', None),
        ('{"text_config": 1, "max_position_embeddings": 64}', None),
        *(("{}", None), ("[]", None), ("{", None), (None, None)),
    ],
)
def test_what_config_json_does_not_state_is_left_to_transformers(config, expected, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert stated_positions(tmp_path) == expected


@pytest.mark.quick("yarn")
@pytest.mark.parametrize(("kind", "room", "positions"), [("yarn", 300, 400), ("linear", 300, 400), ("dynamic", 0, 400)])
def test_engine_and_console_take_what_the_scaling_allows(kind, room, positions, tmp_path):
    from tiny.llama import TOKENIZER, write_recipe

    from kvconvert import calibrate, export

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    config = LlamaConfig(
        vocab_size=4096, num_hidden_layers=2, max_position_embeddings=100, rope_parameters=rope, eos_token_id=0, **sizes
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((TOKENIZER / name).read_bytes())
    recipe = str(write_recipe(tmp_path / "recipe.toml"))
    calibrate(tmp_path / "model", tmp_path / "work", recipe=recipe, samples=2, seq_len=120, progress=False)
    bundle = export(tmp_path / "work", tmp_path / "bundle", progress=False)
    # Angles of a dynamic RoPE follow from the longest row, and would change under the others.
    assert Engine(*load(bundle)).room(100) == room
    assert Console(bundle, 2, "cpu").positions == positions
