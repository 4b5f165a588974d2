"""A scheme is composed of its methods' parts: fields, rules, sizes, sentences and tensors."""

from dataclasses import replace

import pytest

from kvconvert.errors import RecipeError
from kvconvert.methods import (
    FIELDS,
    PLAN_TENSORS,
    PRESETS,
    SEARCHED_FIELDS,
    KVCalibration,
    KVScheme,
    LayerShape,
    check_layers,
    layer_conventions,
)
from kvconvert.methods.scheme import PARTS, RECIPES
from kvconvert.recipes.recipe import preset_names

SHAPE = LayerShape(num_key_value_heads=2, head_dim=64, value_head_dim=64, value_group_size=32, rotation="sylvester(64)")


def test_every_field_belongs_to_one_part_and_says_what_it_means():
    owned = [name for part in PARTS for name in part.__pydantic_fields__]
    assert sorted(owned) == sorted(FIELDS) == sorted(KVScheme().to_dict())
    assert all(field.rule and field.meaning and field.method for field in FIELDS.values())
    tensors = [name for part in PARTS for name in part.plan_tensors]
    assert sorted(tensors) == sorted(PLAN_TENSORS)
    assert {*SEARCHED_FIELDS} <= {*FIELDS}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_being_written_and_read(name):
    scheme = KVScheme.preset(name)
    assert KVScheme.from_dict(scheme.to_dict()) == scheme
    assert hash(replace(scheme)) == hash(scheme)
    assert scheme.clauses(SHAPE)


def test_an_unknown_preset_or_field_is_refused_with_those_there_are():
    with pytest.raises(RecipeError, match=r"preset 'kity' is not available.*kitty"):
        KVScheme.preset("kity")
    with pytest.raises(RecipeError, match="did you mean kv-only"):
        KVScheme.preset("kv-onyl")
    for recipe in RECIPES:
        with pytest.raises(RecipeError, match=rf"{recipe!r} is a recipe, .*a KV scheme is asked for: \w+ "):
            KVScheme.preset(recipe)
    assert {*RECIPES} == {*preset_names()} - {*PRESETS}
    with pytest.raises(RecipeError, match=r"\[kv\] key_bit is not a field.*key_bits"):
        KVScheme(key_bit=2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"key_bits": 5}, "key_bits = 5 is not possible: choose one of"),
        ({"key_bits": True}, "key_bits = True"),
        ({"value_bits": 2.0}, "value_bits = 2.0"),
        ({"key_group_size": 48}, "key_group_size = 48"),
        ({"page_size": 64}, "pages hold 128 tokens"),
        ({"span_tokens": 100}, "span_tokens = 100 is not possible: it is a multiple of 128 tokens, or 0"),
        ({"span_tokens": 128}, "set key_group_size instead"),
        ({"sink_tokens": -1}, "it is a number of tokens"),
        ({"sink_tokens": 128}, "sink_tokens = 128 is not possible: it is a number of tokens, 0 to 127"),
        ({"boost_fraction": float("nan")}, "it is a share of the channels"),
        ({"boost_fraction": 1.5}, "it is a share of the channels"),
        ({"key_clip_ratio": 0}, "above 0 and at most 1"),
        ({"tau1": 2e4}, "a shift of scores"),
        ({"rotate_keys": "fast"}, "choose none or hadamard"),
        ({"modality": "visual"}, "only spans hold those of one modality"),
        ({"key_granularity": "span"}, "keys and values are both kept in spans"),
        ({"tau2": 1.0}, "scores are shifted for spans only"),
        ({"key_bits": 16, "token_norm": "joint"}, "16-bit keys are stored as they are"),
        ({"heavy_ratio": 0.2}, "heavy_ratio and recent_ratio go together"),
        ({"allocation": "pyramid"}, "it spreads a heavy_ratio"),
        ({"heavy_ratio": 0.2, "recent_ratio": 0.2, "token_norm": "joint"}, "choose per_head"),
        ({"boost_fraction": 0.25, "key_bits": 8}, "1-, 2- or 4-bit keys"),
        ({"boost_fraction": 0.25, "key_bits": 3}, "1-, 2- or 4-bit keys"),
        ({"static_scales": "calibrated", "key_bits": 3, "value_bits": 4}, "too coarse"),
        ({"boost_select": "calibrated"}, "no channel is boosted"),
        ({"static_scales": "calibrated"}, "too coarse"),
        ({"static_scales": "calibrated", "key_bits": 16, "value_bits": 16}, "no scales at all"),
        ({"static_scales": "calibrated", "key_bits": 4, "value_bits": 4, "token_norm": "joint"}, "token_norm to none"),
        ({"static_scales": "calibrated", "key_bits": 4, "value_bits": 8, "boost_fraction": 0.5}, "all have one width"),
        ({"key_scale_bits": 4}, "key_scale_bits = 4 is not possible: choose one of 8 or 16"),
        ({"value_scale_bits": 8, "value_bits": 8}, "codes of more than 4 bits need scales of 16"),
        ({"key_scale_bits": 8, "key_bits": 4, "boost_fraction": 0.25}, "codes of more than 4 bits"),
        ({"key_scale_bits": 8, "static_scales": "calibrated", "key_bits": 4, "value_bits": 4}, "scales of their own"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_by_field_with_the_rule(fields, words):
    with pytest.raises(RecipeError, match=r"^\[kv\] \w+ = .* is not possible: .*\.$") as caught:
        KVScheme(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token_norm": "per_head"}, "nothing per token"),
        ({"boost_fraction": 0.25}, "a span has no pages"),
        ({"heavy_ratio": 0.5, "recent_ratio": 0.1}, "evict with group granularity"),
        ({"value_recent_tokens": 1}, "later tokens stay in full precision anyway"),
        ({"value_bits": 16}, "choose 1, 2, 3, 4 or 8"),
        ({"static_scales": "calibrated", "key_bits": 4, "value_bits": 4}, "keep group granularity"),
    ],
    ids=str,
)
def test_spans_take_no_part_in_what_pages_have(fields, words):
    with pytest.raises(RecipeError) as caught:
        replace(KVScheme.preset("calibquant-2bit"), **fields)
    assert words in str(caught.value)


def test_a_line_about_a_scheme_names_its_methods():
    kitty = ", ".join(KVScheme.preset("kitty").clauses(SHAPE))
    assert "2-bit keys in groups of 128 tokens" in kitty
    assert "8 key channels of each head at 4 bits (dynamic)" in kitty
    assert "first 32 tokens in full precision" in kitty
    visual = KVScheme.preset("calibquant-1bit-visual").clauses(SHAPE)
    assert visual[0] == "visual tokens of prompts as spans, 1-bit keys and 1-bit values per channel"
    assert not any("groups of" in clause for clause in visual)
    static = KVScheme(static_scales="calibrated", key_bits=8, value_bits=8, sink_tokens=4).clauses(SHAPE)
    assert static == ["8-bit keys and 8-bit values with static scales per channel", "first 4 tokens in full precision"]


def test_conventions_speak_of_the_methods_in_use_alone():
    kivi, oscar = KVScheme.preset("kivi"), KVScheme.preset("oscar")
    assert layer_conventions([(kivi, SHAPE)]).keys() == {"kv", "state_bits"}
    assert layer_conventions([(KVScheme(), SHAPE)]).keys() == {"kv"}
    both = layer_conventions([(kivi, SHAPE), (oscar, SHAPE)])
    assert both.keys() == {"kv", "rotation", "token_norm", "state_bits"}
    assert both["rotation"]["matrix"] == {"64": "sylvester(64)"}
    assert layer_conventions([]) == {}


def test_the_tensors_that_a_scheme_cannot_do_without():
    assert KVScheme.preset("kitty").required_tensors(SHAPE) == {}
    fixed = replace(KVScheme.preset("kitty"), boost_select="calibrated").required_tensors(SHAPE)
    wanted = fixed["boosted_channels"]
    assert (wanted.dtype, wanted.shape) == ("I32", (2, 8))
    assert wanted.fault([[0, 1, 2, 3, 4, 5, 6, 63]] * 2) is None
    assert "ascending" in wanted.fault([[0, 1, 2, 3, 4, 5, 7, 6]] * 2)
    assert "0 to 63" in wanted.fault([[0, 1, 2, 3, 4, 5, 6, 64]] * 2)
    one_side = KVScheme(static_scales="calibrated", key_bits=16, value_bits=8).required_tensors(SHAPE)
    assert one_side.keys() == {"static_value_scale", "static_value_zero_point"}
    assert one_side["static_value_scale"].fault([[0.5, -0.1]]) is not None
    assert {*fixed, *one_side} <= {*PLAN_TENSORS}


def test_what_only_calibration_can_decide():
    assert KVScheme().needs_calibration() is None
    assert KVScheme(boost_fraction=0.5, boost_select="calibrated").needs_calibration() == "boost_select"
    assert replace(KVScheme.preset("minikv"), allocation="calibrated").needs_calibration() == "allocation"
    assert KVScheme.preset("minikv-pyramid").needs_calibration() is None
    with pytest.raises(RecipeError, match=r"allocation.*uniform.*calibrated"):
        KVScheme.from_dict(KVScheme.preset("minikv").to_dict() | {"allocation": "var_prop"})
    assert KVScheme(static_scales="calibrated", key_bits=8, value_bits=8).needs_calibration() == "static_scales"


def test_layers_that_share_a_budget_have_one():
    pyramid = KVScheme.preset("minikv-pyramid")
    assert check_layers([pyramid, KVScheme.preset("kivi")]) is None
    assert "several budgets" in check_layers([pyramid, replace(pyramid, heavy_ratio=0.1)])


def test_what_is_searched_is_what_nobody_states():
    span = KVScheme.preset("calibquant-1bit")
    assert KVCalibration().searched(span) == ["key_clip_ratio", "value_clip_ratio", "key_rounding", "tau1 and tau2"]
    assert KVCalibration(given=["tau2", "key_clip_ratio", "key_rounding"]).searched(span) == ["value_clip_ratio"]
    neither = KVCalibration(calibrate_clip_ratios=False, calibrate_key_rounding=False)
    assert neither.searched(KVScheme.preset("kivi")) == []
    assert KVCalibration(calibrate_clip_ratios=False).searched(KVScheme(key_bits=4)) == []
