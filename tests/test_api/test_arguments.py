"""Arguments of another kind than what is meant, a model for its directory say, are refused in a sentence."""

import pytest
from transformers import LlamaConfig

from kvconvert import KVCache, KVScheme, Recipe, bench, calibrate, evaluate, export, load
from kvconvert.errors import UsageError
from kvconvert.runtime.engine import Engine, Sampling

MODEL = object()
CALLS = {
    "load": lambda: load(MODEL),
    "load nothing": lambda: load(None),
    "evaluate": lambda: evaluate(MODEL),
    "bench": lambda: bench(["x"]),
    "calibrate": lambda: calibrate(MODEL, "work"),
    "calibrate to": lambda: calibrate("model", None),
    "export": lambda: export(None, "bundle"),
    "export to": lambda: export("work", MODEL),
    "recipe": lambda: Recipe.of(3),
    "Engine": lambda: Engine("bundle"),
    "recipe's name": lambda: Recipe.load(3),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_place_or_model_is_named_with_what_to_give(name):
    with pytest.raises(UsageError, match=r"^`\w+` is of type (object|NoneType|list|int|str); give .*\.$"):
        CALLS[name]()


NUMBERS = {
    "calibrate": lambda: calibrate("examples/reference-lm", "work", samples="3"),
    "calibrate's length": lambda: calibrate("examples/reference-lm", "work", seq_len=2.5),
    "calibrate's seed": lambda: calibrate("examples/reference-lm", "work", seed="a"),
    "evaluate": lambda: evaluate("bundle", tokens="64"),
    "evaluate's context": lambda: evaluate("bundle", context="1024"),
    "Engine": lambda: Engine(MODEL, max_batch="8"),
    "Engine's queue": lambda: Engine(MODEL, max_waiting=2.5),
    "KVCache": lambda: KVCache(LlamaConfig(num_hidden_layers=1), "kivi", kv_memory="1GB"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_whole_number_is_refused_as_that(name):
    with pytest.raises(UsageError, match=r"^`\w+` is ('.*'|2\.5); give a whole number\.$"):
        NUMBERS[name]()


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_a_sampling_of_text_is_refused(field):
    with pytest.raises(UsageError, match=f"`{field}` is 'hot'; give a number"):
        Sampling(**{field: "hot"})


@pytest.mark.parametrize("changes", ["kv.key_bits=3", ["kv.key_bits=3"], {3: 3}])
def test_changes_of_a_recipe_are_values_by_key(changes):
    with pytest.raises(UsageError, match="give values by table and key"):
        Recipe.load("default", changes)


def test_a_recipe_is_read_from_a_path(tmp_path):
    (tmp_path / "mine.toml").write_text('[kv]\npreset = "kivi"\n')
    assert Recipe.load(tmp_path / "mine.toml").kv == KVScheme.preset("kivi")


def test_data_of_another_kind_is_refused_before_a_model_is_read(tmp_path):
    with pytest.raises(UsageError, match="`data` is 3; name a source"):
        calibrate("examples/reference-lm", tmp_path / "work", data=3)
