"""Arguments of another kind than what is meant, a model for its directory say, are refused in a sentence."""

import pytest

from kvconvert import Recipe, bench, calibrate, evaluate, export, load
from kvconvert.errors import UsageError
from kvconvert.runtime.engine import Engine

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
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_place_or_model_is_named_with_what_to_give(name):
    with pytest.raises(UsageError, match=r"^`\w+` is of type (object|NoneType|list|int|str); give .*\.$"):
        CALLS[name]()


def test_data_of_another_kind_is_refused_before_a_model_is_read(tmp_path):
    with pytest.raises(UsageError, match="`data` is 3; name a source"):
        calibrate("examples/reference-lm", tmp_path / "work", data=3)
