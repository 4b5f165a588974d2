"""examples/train_code_lm.py runs from texts to a checkpoint, and its drills say what they ask for."""

import json

import numpy as np
import pytest
import train_code_lm as training
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Tokens of these tests' own code."""
    folder = tmp_path_factory.mktemp("code")
    texts = [file.read_text(encoding="utf-8") for file in sorted(training.Path(__file__).parent.glob("*.py"))]
    (folder / "novel.txt").write_text("It was a dark night, and the house was still. " * 400, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "packages", lambda: texts)
        training.prepare(folder / "data", [folder / "novel.txt"])
    return folder / "data"


def test_every_kind_of_row_is_as_long_as_asked(data):
    rows = training.Rows(data, 0)
    for kind in training.PHASES[0].mixture:
        row = getattr(rows, kind)(300)
        assert row.shape == (300,), kind
        assert row.max() < training.VOCABULARY, kind


def test_a_row_of_facts_ends_with_a_number_that_it_stated(data):
    rows = training.Rows(data, 0)
    for _ in range(20):
        row = rows.fact(1000)
        number = rows.tokenizer.decode(row[-6:-1].tolist())
        assert number.isdigit()
        assert len(number) == 5
        assert rows.tokenizer.decode(row[:-6].tolist()).count(number) >= 1


@pytest.mark.full
def test_a_checkpoint_is_trained_that_transformers_loads(data, tmp_path):
    training.train(data, tmp_path / "model", minutes=0.005, device="cpu", seed=0, tiny=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.model_type == "gpt_neox"
    assert model.config.rope_parameters["partial_rotary_factor"] == 0.25
    assert model(**tokenizer("x = 12", return_tensors="pt")).logits.isfinite().all()
    made = json.loads((tmp_path / "model" / "training.json").read_text(encoding="utf-8"))
    assert made["tokens"] > 0
    assert np.isfinite(made["stdlib_perplexity"])
