"""The plan as a picture in a terminal, and what inspect and the card say of spans over text."""

import io
import sys

import pytest
from tiny.bundle import tiny_manifest, write_tiny_bundle

from kvconvert.bundle.card import model_card
from kvconvert.bundle.describe import describe, manifest_text, plan_picture, wrapped
from kvconvert.bundle.manifest import LayerPlan
from kvconvert.commands.inspect import inspect
from kvconvert.methods import PRESETS, KVScheme


def layers(*schemes):
    shape = {"head_dim": 16, "num_key_value_heads": 2, "value_group_size": 16}
    return [
        LayerPlan(index=i, kv=None if scheme is None else scheme.to_dict(), **shape) for i, scheme in enumerate(schemes)
    ]


def test_layers_that_look_the_same_share_a_row_and_each_bit_is_a_block():
    two, four = KVScheme(), KVScheme(key_bits=4, value_bits=3)
    picture = plan_picture(layers(two, two, KVScheme(sink_tokens=4), four, None, None), unicode=False)
    assert picture.splitlines() == [
        "layers  keys                 values",
        "0-2     ## 2                 ## 2",
        "3       #### 4               ### 3",
        "4-5     own cache",
    ]
    assert (
        plan_picture(layers(four), unicode=True).splitlines()[1]
        == "0       \u2588\u2588\u2588\u2588 4   \u2588\u2588\u2588 3"
    )


def test_what_the_plans_of_all_layers_have_in_common_is_said_once():
    plans = [KVScheme(sink_tokens=4), KVScheme(sink_tokens=4, key_bits=4), KVScheme(sink_tokens=4, token_norm="joint")]
    common, *rest = described(*plans)
    assert common[0] == "all"
    assert "first 4 tokens in full precision" in common[1]
    assert [name for name, _ in rest] == ["0", "1", "2"]
    assert not [clause for _, clauses in rest for clause in clauses if clause in common[1]]
    for plan, (_, clauses) in zip(plans, rest, strict=True):
        assert {*common[1], *clauses} == {*described(plan)[0][1]}


def test_layers_without_a_plan_share_nothing_and_equal_plans_around_one_are_said_once():
    plan = KVScheme(sink_tokens=4)
    (whole,) = described(plan, plan)
    assert whole[0] == "0-1"
    assert described(plan, None, plan) == [("all planned", whole[1]), ("1", ["left to the model's own cache"])]
    manifest = tiny_manifest({}, {}).model_copy(update={"layers": layers(plan, None, plan)})
    assert "\nall planned layers\n" in manifest_text(manifest)


def described(*schemes):
    return describe(tiny_manifest({}, {}).model_copy(update={"layers": layers(*schemes)})).layers


def test_lines_end_between_clauses():
    clauses = [f"clause {i} {'x' * 20}" for i in range(9)]
    lines = wrapped(clauses, "  ").splitlines()
    assert max(map(len, lines)) <= 101
    assert " ".join(line.strip() for line in lines).split(", ") == clauses


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "\u2588\u2588 2"), ("ascii", "## 2"), ("latin-1", "## 2")])
def test_inspect_draws_with_what_the_output_can_show(tmp_path, monkeypatch, encoding, shown):
    write_tiny_bundle(tmp_path / "bundle")
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    inspect.callback(tmp_path / "bundle", layers=True, as_json=False)
    output.flush()
    assert shown in output.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("name", PRESETS)
def test_spans_over_text_are_said_to_be_a_poor_choice_and_nothing_else_is(name):
    manifest = tiny_manifest({}, {}).model_copy(update={"layers": layers(PRESETS[name], PRESETS[name])})
    poor = name.startswith("calibquant") and "visual" not in name
    for text in (manifest_text(manifest), model_card(manifest)):
        assert text.count("poor choice for text") == poor
