"""`kvconvert recipes`, and single values in the place of a recipe's own."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from tiny.commands import kvconvert
from tiny.llama import write_tiny_llama

from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import KvconvertError, MissingError, RecipeError, UsageError
from kvconvert.methods import PAPER_PRESETS, PRESETS, KVScheme
from kvconvert.methods.auto import CHOSEN_FIELDS
from kvconvert.recipes.recipe import Limits, Recipe, gathered, parse_change, preset_names
from kvconvert.recipes.text import USES, bits_per_value, recipe_toml


def load(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return Recipe.load(str(path))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_survives_being_recorded(name):
    recipe = Recipe.load(name)
    assert recipe.name == name
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_default_is_4_bits_with_a_cache_whose_keys_are_measured():
    recipe = Recipe.load("default")
    assert recipe.weights.model_dump() == {
        "method": "auto",
        "bits": 4,
        "group_size": "auto",
        "average_bits": None,
        "modules": [],
        "kept_share": None,
    }
    assert recipe.kv == PRESETS["default"]
    assert recipe.calibration.calibrate_keys
    assert recipe.limits.as_set() == {}


def test_a_table_that_is_left_out_takes_the_default(tmp_path):
    recipe = load(tmp_path, '[weights]\nmethod = "rtn"\n')
    assert (recipe.name, recipe.weights.method, recipe.kv) == ("mine", "rtn", PRESETS["default"])
    assert recipe.calibration.calibrate_keys


def test_a_treatment_that_is_stated_is_not_chosen(tmp_path):
    for field, value in (("rotate_keys", "hadamard"), ("token_norm", "joint"), ("key_center", "calibrated")):
        recipe = Recipe.load("default", {f"kv.{field}": value})
        assert getattr(recipe.kv, field) == value
        assert not recipe.calibration.calibrate_keys
    layers = load(tmp_path, '[kv]\npreset = "default"\n[[kv.layers]]\nindex = [1]\nrotate_keys = "hadamard"\n')
    assert layers.calibration_of(0).calibrate_keys
    assert not layers.calibration_of(1).calibrate_keys
    with pytest.raises(RecipeError, match="rotate_keys beside calibrate_keys = true, which chooses it"):
        load(tmp_path, '[kv]\npreset = "kivi"\nrotate_keys = "hadamard"\ncalibrate_keys = true\n')


def test_fields_replace_the_values_of_a_kv_preset(tmp_path):
    recipe = load(tmp_path, '[kv]\npreset = "oscar"\nkey_bits = 4\nkey_clip_ratio = 0.85\n')
    assert (recipe.kv.key_bits, recipe.kv.key_clip_ratio, recipe.kv.rotate_keys) == (4, 0.85, "hadamard")


def test_what_a_recipe_states_itself_is_not_searched(tmp_path):
    recipe = load(
        tmp_path,
        '[kv]\npreset = "calibquant-1bit"\nvalue_clip_ratio = 0.4\ntau_grid = [0, 0.5]\ntau_per_layer = true\n'
        '[[kv.layers]]\nindex = [2, 3]\ntau2 = 1.0\n[[kv.layers]]\nindex = [5]\npreset = "kivi"\n',
    )
    own = recipe.calibration
    assert (own.tau_grid, own.tau_per_layer, own.given, own.searches_tau) == (
        [0.0, 0.5],
        True,
        ["value_clip_ratio"],
        True,
    )
    assert (own.searches_clip_ratio("key"), own.searches_clip_ratio("value")) == (True, False)
    assert recipe.kv.key_clip_ratio == 0.3  # the preset's, replaced by what calibration finds
    override = recipe.calibration_of(3)
    assert (override.given, override.searches_tau, recipe.scheme(3).tau2) == (["tau2", "value_clip_ratio"], False, 1.0)
    assert recipe.scheme(3).value_clip_ratio == 0.4
    assert (recipe.scheme(5), recipe.calibration_of(5).given) == (PRESETS["kivi"], [])
    assert (recipe.scheme(4), recipe.calibration_of(4)) == (recipe.kv, own)
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_a_paper_preset_is_the_paper_and_calibration_chooses_what_the_paper_does(tmp_path):
    oscar, paper = Recipe.load("oscar"), Recipe.load("oscar-paper")
    assert (oscar.kv.sink_tokens, paper.kv) == (4, replace(oscar.kv, sink_tokens=0, state_bits=16))
    assert oscar.calibration.searched(oscar.kv) == ["key_clip_ratio", "value_clip_ratio", "key_rounding"]
    assert paper.calibration.searched(paper.kv) == []
    spans = Recipe.load("calibquant-1bit-paper")
    assert spans.calibration.searched(spans.kv) == ["tau1 and tau2"]
    asked = load(tmp_path, '[kv]\npreset = "oscar-paper"\ncalibrate_clip_ratios = true\n')
    assert (asked.kv, asked.calibration) == (paper.kv, replace(oscar.calibration, calibrate_key_rounding=False))


def test_a_layers_preset_brings_what_calibration_chooses_unless_kv_states_it(tmp_path):
    layers = '[[kv.layers]]\nindex = [0]\npreset = "kivi"\n[[kv.layers]]\nindex = [1]\npreset = "kivi-paper"\n'
    layers += "[[kv.layers]]\nindex = [2]\nkey_bits = 4\n"

    def searches(kv):
        recipe = load(tmp_path, f'[kv]\npreset = "{kv}\n{layers}')
        return [recipe.calibration_of(index).calibrate_clip_ratios for index in range(4)]

    assert searches('oscar"') == [True, False, True, True]
    assert searches('oscar-paper"') == [True, False, False, False]
    assert searches('oscar"\ncalibrate_clip_ratios = false') == [False, False, False, False]


def test_kv_none_leaves_the_cache_alone(tmp_path):
    assert load(tmp_path, '[kv]\npreset = "none"\n').kv is None


def test_limits_accept_whole_numbers(tmp_path):
    assert load(tmp_path, "[limits]\nmax_kl = 1\n").limits.as_set() == {"max_kl": 1.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[weights]\nbit = 4\n", ["mine.toml", "[weights]", "bit", "did you mean bits?"]),
        ("[wights]\nbits = 4\n", ["mine.toml", "[wights]", "[weights], [kv], [auto] and [limits]"]),
        ("bits = 4\n", ["mine.toml", "bits"]),
        ("weights = 4\n", ["mine.toml", "weights"]),
        ('[weights]\nmethod = "hqq"\n', ["mine.toml", "[weights] method", "hqq", "'awq'"]),
        ("[weights]\nbits = 5\n", ["mine.toml", "[weights] bits = 5", "2, 3, 4 and 8"]),
        (
            '[[weights.modules]]\nmatch = "*.up_proj"\nbits = 6\n',
            ["mine.toml", '"*.up_proj" bits = 6', "2, 3, 4 and 8"],
        ),
        ("[[weights.modules]]\nindex = [0]\n", ["mine.toml", "[weights] modules.0.bits", "required"]),
        ("[[weights.modules]]\nlayer = [0]\nbits = 8\n", ["mine.toml", "modules.0.layer", "[weights]"]),
        (
            '[weights]\nmethod = "none"\n[[weights.modules]]\nbits = 8\n',
            ["mine.toml", "[[weights.modules]]", "remove one"],
        ),
        ('[weights]\nbits = "4"\n', ["mine.toml", "[weights] bits"]),
        ("[weights]\ngroup_size = 100\n", ["mine.toml", "group_size = 100", "128"]),
        ("[weights]\ngroup_size = true\n", ["mine.toml", "[weights] group_size = True", '"auto" or one of 16']),
        ('[weights]\ngroup_size = "128"\n', ["mine.toml", "[weights] group_size = '128'", '"auto"']),
        ('[kv]\npreset = "oskar"\n', ["mine.toml", "'oskar'", "oscar"]),
        ("[kv]\nkey_bit = 2\n", ["mine.toml", "[kv] key_bit", "key_bits"]),
        ("[kv]\nkey_bits = 5\n", ["mine.toml", "[kv] key_bits = 5"]),
        ("[kv]\nmodality = 'visual'\n", ["mine.toml", "modality = 'visual'", "only spans"]),
        ('[kv]\npreset = "calibquant-1bit"\nmodality = "images"\n', ["mine.toml", "modality", "visual or audio"]),
        ('[kv]\npreset = "none"\nkey_bits = 2\n', ["mine.toml", "[kv] key_bits", "none"]),
        ('[kv]\npreset = "none"\ncalibrate_clip_ratios = true\n', ["mine.toml", "[kv] calibrate_clip_ratios", "none"]),
        ("[kv]\ncalibrate_clip_ratios = 1\n", ["mine.toml", "[kv] calibrate_clip_ratios = 1"]),
        ("[kv]\ntau_grid = [0, 1]\n", ["mine.toml", "[kv] tau_grid", "spans only"]),
        ("[kv]\ntau_per_layer = true\n", ["mine.toml", "[kv] tau_per_layer", "spans only"]),
        ('[kv]\npreset = "calibquant-2bit"\ntau1 = 1.0\ntau_grid = [0]\n', ["mine.toml", "tau_grid", "is given"]),
        ('[kv]\npreset = "calibquant-2bit"\ntau_grid = []\n', ["mine.toml", "[kv] tau_grid"]),
        ('[kv]\npreset = "calibquant-2bit"\ntau_grid = [0, inf]\n', ["mine.toml", "[kv] tau_grid", "inf"]),
        ("[kv]\nlayers = 3\n", ["mine.toml", "kv.layers", "[[kv.layers]]"]),
        ('[kv]\npreset = "KIVI"\n', ["did you mean kivi?"]),
        ('[kv]\npreset = "kv-only"\n', ["preset = 'kv-only', which names a whole recipe"]),
        ("[[kv.layers]]\nkey_bits = 4\n", ["mine.toml", "[[kv.layers]] without index"]),
        ("[[kv.layers]]\nindex = [-1]\nkey_bits = 4\n", ["mine.toml", "[[kv.layers]] index = [-1]"]),
        ("[[kv.layers]]\nindex = 1\nkey_bits = 4\n", ["mine.toml", "[[kv.layers]] index = 1"]),
        ("[[kv.layers]]\nindex = [1]\n", ["mine.toml", "changes nothing"]),
        ("[[kv.layers]]\nindex = [1]\ntau_grid = [1]\n", ["mine.toml", "tau_grid", "for all layers"]),
        ("[[kv.layers]]\nindex = [1]\nkey_bit = 4\n", ["mine.toml", "key_bit is not a field"]),
        ("[[kv.layers]]\nindex = [1, 1]\nkey_bits = 4\n", ["mine.toml", "layer 1 twice"]),
        ('[kv]\npreset = "none"\n[[kv.layers]]\nindex = [1]\nkey_bits = 4\n', ["mine.toml", "without a preset"]),
        (
            '[kv]\npreset = "minikv-pyramid"\n[[kv.layers]]\nindex = [1]\nheavy_ratio = 0.1\n',
            ["mine.toml", "several budgets"],
        ),
        ('[weights]\ngroup_size = "AUTO"\n', ['not possible: choose "auto" or']),
        ("[limits]\nmax_kl = -1\n", ["mine.toml", "[limits] max_kl", "-1"]),
        ("[limits]\nmax_kl = nan\n", ["mine.toml", "[limits] max_kl", "nan"]),
        ("[limits]\nmax_kl = 1e19\n", ["mine.toml", "[limits] max_kl", "1e+19"]),
        ("[limits]\nmax_perplexity_increase = 1e300\n", ["mine.toml", "max_perplexity_increase", "1e+300"]),
        ("[limits]\nmin_retrieval = 1.5\n", ["mine.toml", "[limits] min_retrieval"]),
        ("[limits]\nmax_kld = 1\n", ["mine.toml", "[limits]", "max_kld"]),
        ('[weights]\nmethod = "none"\n[kv]\npreset = "none"\n', ["mine.toml", "nothing to convert"]),
        ("[weights\n", ["mine.toml", "TOML"]),
    ],
)
def test_a_recipe_that_means_nothing_is_refused_by_file_table_and_key(tmp_path, text, words):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_preset_is_told_what_it_is_like_or_those_there_are():
    with pytest.raises(RecipeError, match=r"'defalt'.*did you mean default\?"):
        Recipe.load("defalt")
    with pytest.raises(RecipeError, match=r"'zzz'.*default.*kv-only"):
        Recipe.load("zzz")


def test_a_missing_recipe_file_is_named(tmp_path):
    with pytest.raises(MissingError, match=r"gone\.toml"):
        Recipe.load(str(tmp_path / "gone.toml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[kv]\npreset = [[1]]\n", r"\[kv\] preset = \[\[1\]\], which is no name"),
        (f"[weights]\nbits = 0x{'f' * 5000}\n", "an integer of more than 64 bits"),
        (f'[kv]\npreset = "{"x" * 5000}"\n', "a text of 5,000 characters"),
        (f"kv.{'.'.join('a' * 3000)} = 1\n", "3000 dots in line 1"),
        (f"kv.{'.'.join('a' * 30)} = 1\n", "more than 7 deep"),
        ("# " + "x" * 2**18, "more than 262,144 characters"),
    ],
)
def test_values_of_which_no_sentence_can_be_made_are_refused_in_a_short_one(tmp_path, text, words):
    with pytest.raises(RecipeError, match=words) as caught:
        load(tmp_path, text)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("key", ["", ".", "kw.key_bits"])
def test_a_change_of_no_table_is_refused(key):
    with pytest.raises(RecipeError, match=r"unknown table|write table\.key, as in kv\.key_bits"):
        Recipe.load("default", {key: 1})


def test_layers_are_compared_in_time_that_grows_with_their_number(tmp_path):
    numbers = ", ".join(map(str, range(30_000)))
    recipe = load(tmp_path, f'[kv]\npreset = "kivi"\n[[kv.layers]]\nindex = [{numbers}]\nkey_bits = 4\n')
    assert len(recipe.layers[0].index) == 30_000


FLOATS = [("kv", name) for name, field in KVScheme.__dataclass_fields__.items() if "float" in str(field.type)]
FLOATS += [("weights", "average_bits"), *(("limits", name) for name in Limits.model_fields)]
FLOATS += [("auto", "kv_bits"), ("auto", "kv_bytes_per_token")]


@pytest.mark.parametrize("value", ["1e400", "-inf", "nan"])
@pytest.mark.parametrize(("table", "name"), FLOATS)
def test_a_number_without_end_or_that_is_none_is_refused(tmp_path, table, name, value):
    base = 'preset = "minikv-pyramid"\n' if table == "kv" else ""
    with pytest.raises(RecipeError, match=name):
        load(tmp_path, f"[{table}]\n{base}{name} = {value}\n")


def test_a_recipe_file_may_begin_with_the_mark_of_utf_8(tmp_path):
    (tmp_path / "mine.toml").write_text('[kv]\npreset = "kivi"\n', encoding="utf-8-sig")
    assert Recipe.load(tmp_path / "mine.toml").kv == Recipe.load("kivi").kv


def test_a_pipe_is_no_recipe_but_that_of_a_shell_is(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")  # reading it would wait for ever
    with pytest.raises(MissingError, match=r"pipe\.toml cannot be read \(it is a pipe, whose end may never come\)"):
        Recipe.load(tmp_path / "pipe.toml")
    source, target = os.pipe()
    os.write(target, b'[kv]\npreset = "kivi"\n')
    os.close(target)
    assert Recipe.load(f"/dev/fd/{source}").kv == PRESETS["kivi"]
    os.close(source)


def test_a_recipe_file_in_another_encoding_is_refused_as_that(tmp_path):
    (tmp_path / "mine.toml").write_bytes("# größer\n".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"mine\.toml is not text in UTF-8; save it as that"):
        Recipe.load(tmp_path / "mine.toml")


@pytest.mark.parametrize("text", ["{}a = 1", "[{}a]", "[kv]\nx = {{{}a = 1}}", '[kv]\n"=" . {}a = 1'])
def test_names_of_very_many_parts_are_refused_before_they_are_read(tmp_path, text):
    with pytest.raises(RecipeError, match=r"mine\.toml has \d+ dots in line [12], and no more than 100 are read"):
        load(tmp_path, text.format("a." * 2000))


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


@pytest.mark.parametrize("same", ["span_tokens = 0", 'modality = "all"'])
def test_a_table_of_layers_that_changes_nothing_is_not_shown(tmp_path, same):
    (tmp_path / "first.toml").write_text(f"[kv]\n[[kv.layers]]\nindex = [0]\n{same}\n")
    recipe = Recipe.load(str(tmp_path / "first.toml"))
    (tmp_path / "again.toml").write_text(recipe_toml(recipe))
    again = Recipe.load(str(tmp_path / "again.toml"))
    assert (again.scheme(0), again.calibration_of(0)) == (recipe.scheme(0), recipe.calibration_of(0))


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


@pytest.mark.parametrize("sign", ["\n", "\x07", "\x1b]0;title\x07", "\x9b2J", "\u202e"], ids=ascii)
def test_no_control_character_of_a_recipe_reaches_a_message(sign):
    for refused in (
        lambda: Recipe.load(f"kivi{sign}"),
        lambda: Recipe.from_dict({"name": sign, sign: 1}),
        lambda: KVScheme.from_dict({sign: 1}),
    ):
        with pytest.raises(RecipeError) as told:
            refused()
        assert str(told.value).isprintable()


def test_no_control_character_reaches_a_message_of_any_kind():
    kinds = [KvconvertError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__init__ is KvconvertError.__init__:
            assert str(kind("a\x1b[2J\nb")) == r"a\x1b[2J\nb"
    assert len(kinds) > 10
