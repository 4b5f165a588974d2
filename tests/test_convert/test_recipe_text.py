"""`kvconvert recipes`, and single values in the place of a recipe's own."""

import pytest
from tiny.commands import kvconvert
from tiny.llama import write_tiny_llama

from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import RecipeError, UsageError
from kvconvert.methods import PAPER_PRESETS
from kvconvert.methods.auto import CHOSEN_FIELDS
from kvconvert.recipes.recipe import Recipe, gathered, parse_change, preset_names
from kvconvert.recipes.text import USES, bits_per_value, recipe_toml

FILES = {
    "layers": """
[weights]
method = "gptq"
bits = 3
[[weights.modules]]
match = "*.down_proj"
index = [0, 1]
bits = 8
[kv]
preset = "oscar"
key_clip_ratio = 0.9
calibrate_key_rounding = false
[[kv.layers]]
index = [0]
key_bits = 4
value_clip_ratio = 0.8
[[kv.layers]]
index = [1, 3]
preset = "none"
[[kv.layers]]
index = [2]
preset = "kitty-paper"
calibrate_clip_ratios = true
[limits]
max_kl = 0.1
""",
    "some layers alone": """
[kv]
preset = "none"
[[kv.layers]]
index = [4]
preset = "kivi"
value_bits = 8
""",
    "plain": '[weights]\nmethod = "none"\n[kv]\nkey_bits = 4\ncalibrate_clip_ratios = false\n',
    "spans": '[kv]\npreset = "calibquant-2bit"\ntau_grid = [0, 2]\nkey_clip_ratio = 0.5\n',
    "average": "[weights]\naverage_bits = 3.5\n",
    "budgets": '[kv]\npreset = "minikv"\nallocation = "calibrated"\n',
    "search": '[kv]\npreset = "oscar-g128"\nsink_tokens = 8\n[auto]\nkv_bits = 2.5\ncontext = 1000\n',
}


def meaning(recipe):
    """All that a recipe does; what [auto] replaces in every candidate means nothing."""
    values = recipe.to_dict() | {"name": ""}
    if recipe.auto is not None:
        values["kv"] = {name: value for name, value in values["kv"].items() if name not in CHOSEN_FIELDS}
    return values


@pytest.mark.parametrize("name", [*preset_names(), *FILES])
def test_a_recipe_that_is_shown_and_read_again_means_the_same(tmp_path, name):
    if name in FILES:
        (tmp_path / "first.toml").write_text(FILES[name])
    recipe = Recipe.load(str(tmp_path / "first.toml") if name in FILES else name)
    shown = recipe_toml(recipe)
    (tmp_path / "again.toml").write_text(shown)
    assert meaning(Recipe.load(str(tmp_path / "again.toml"))) == meaning(recipe)


def test_what_differs_from_the_default_says_so():
    lines = kvconvert("recipes", "kitty", "--value-bits", "4", "--set", "weights.group_size=64").stdout.splitlines()
    assert lines[0].startswith(
        "# kitty with kv.value_bits = 4, weights.group_size = 64: weights scaled by AWQ and quantized by GPTQ, in "
        "mixtures of experts by AWQ (4 bits)"
    )
    assert "value_bits = 4  # default: 2; the same for values" in lines
    assert 'group_size = 64  # default: "auto"; inputs that share a scale and zero point' in lines
    assert "key_bits = 2" in lines


def test_every_preset_is_listed_with_its_bits_and_when_to_take_it():
    listed = kvconvert("recipes").stdout
    rows = {line.split()[0]: line for line in listed.splitlines()[1:] if line}
    for name in preset_names():
        if name in PAPER_PRESETS:
            assert name in listed
        else:
            assert USES[name] in rows[name]
            assert max(map(len, rows[name].splitlines())) <= 120
    assert f"{bits_per_value(Recipe.load('kivi').kv):.2f}" in rows["kivi"]
    # 2 bits, and 32 for each group of 32 numbers, of keys as of values; 4 sink tokens
    # besides and the page being filled exact.
    lengths = range(3969, 4097)
    bits = 3 + sum(16 * 4 + 13 * (n % 128) for n in lengths) / sum(lengths)
    assert bits_per_value(Recipe.load("kivi").kv) == pytest.approx(bits)


def test_a_change_is_as_if_the_file_said_so(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[kv]\npreset = "default"\nkey_bits = 4\nkey_clip_ratio = 0.9\n[weights]\ngroup_size = 32\n'
        "[limits]\nmax_kl = 1\n"
    )
    changes = {"kv.key_bits": 4, "kv.key_clip_ratio": 0.9, "weights.group_size": 32, "limits.max_kl": 1}
    assert meaning(Recipe.load("default", changes)) == meaning(Recipe.load(str(file)))
    file.write_text("[limits]\nmax_kl = 1\n")
    assert Recipe.load(str(file), {"kv.key_bits": 4}).kv == Recipe.load("default", {"kv.key_bits": 4}).kv


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kv.key_bits=3", ("kv.key_bits", 3)),
        ("weights.method = gptq", ("weights.method", "gptq")),
        ("weights.method='rtn'", ("weights.method", "rtn")),
        ("kv.calibrate_clip_ratios=false", ("kv.calibrate_clip_ratios", False)),
        ("kv.tau_grid=[0, 1]", ("kv.tau_grid", [0, 1])),
    ],
)
def test_a_typed_value_is_read_as_toml_or_as_text(text, expected):
    assert parse_change(text) == expected


@pytest.mark.parametrize("text", ["", "key_bits=3", "kv.key_bits", "kv.key_bits=", "model.bits=3", "kv.a b=3"])
def test_a_change_that_names_no_value_is_refused(text):
    with pytest.raises(UsageError, match=r"table\.key=value"):
        parse_change(text)


@pytest.mark.parametrize(
    ("recipe", "changes", "said"),
    [
        ("default", {"kv.key_bits": 5}, "key_bits = 5 is not possible"),
        ("default", {"kv.key_bytes": 5}, "key_bytes is not a field"),
        ("default", {"weights.group_size": 48}, "with weights.group_size = 48 asks for"),
        ("weights-only", {"kv.key_bits": 3}, 'beside preset = "none"'),
        ("kv-only", {"weights.group_size": 64}, "keeps every weight"),
        ("auto", {"kv.key_bits": 3}, "which chooses it for every layer"),
    ],
)
def test_a_change_is_checked_like_a_file(recipe, changes, said):
    with pytest.raises(RecipeError, match=said):
        Recipe.load(recipe, changes)


def test_one_value_is_changed_once():
    assert [*gathered([("weights.bits", 8), ("kv.key_bits", 3)])] == ["kv.key_bits", "weights.bits"]
    result = kvconvert("recipes", "default", "--key-bits", "3", "--set", "kv.key_bits=4")
    assert (result.exit_code, "kv.key_bits is given twice" in result.stderr) == (2, True)
    assert kvconvert("recipes", "--key-bits", "3").exit_code == 2


def test_options_of_calibrate_are_recorded_as_the_recipe(tmp_path):
    write_tiny_llama(tmp_path / "model", tied=True)
    options = ["--weights", "rtn", "--group-size", "16", "--value-bits", "4", "--set", "kv.sink_tokens=2"]
    sizes = ["--samples", "2", "--seq-len", "16"]
    result = kvconvert("calibrate", tmp_path / "model", "-o", tmp_path / "work", *sizes, *options)
    assert result.exit_code == 0, result.output
    changes = {"kv.sink_tokens": 2, "kv.value_bits": 4, "weights.group_size": 16, "weights.method": "rtn"}
    assert WorkDir.open(tmp_path / "work").state.recipe == Recipe.load("default", changes).to_dict()
