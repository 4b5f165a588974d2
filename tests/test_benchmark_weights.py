"""What `benchmarks/weights.py` measures is the model that a conversion makes."""

import json
import sys

import pytest
import torch
import weights
from tiny.checkpoints import save_checkpoint, save_text
from transformers import AutoModelForCausalLM
from weights_measure import Case, quantized_model

import kvconvert
from kvconvert.runtime import load


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("weights")
    save_text(place)
    return save_checkpoint(place / "model")


def test_the_measured_model_is_the_converted_one(model, tmp_path):
    case = Case.parse("awq+gptq:bits=3,group_size=32,samples=4,length=32", 64)
    text = str(model.parent / "text.txt")
    measured = quantized_model(model, case, text, 0, "cpu")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[weights]\nmethod = "awq+gptq"\nbits = 3\ngroup_size = 32\n\n[kv]\npreset = "none"\n')
    kvconvert.calibrate(model, tmp_path / "work", recipe=str(recipe), data=text, samples=4, seq_len=32, progress=False)
    kvconvert.export(tmp_path / "work", tmp_path / "bundle", progress=False)
    converted, _ = load(tmp_path / "bundle", dtype=torch.float32)
    ids = torch.arange(2, 34)[None]
    with torch.no_grad():
        torch.testing.assert_close(measured(ids).logits, converted(ids).logits, atol=2e-3, rtol=1e-3)
        source = AutoModelForCausalLM.from_pretrained(model)(ids).logits
    assert not torch.allclose(measured(ids).logits, source, atol=0.05)


@pytest.mark.full
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_rows_are_measured_and_kept(model, tmp_path, monkeypatch, jobs, capsys):
    folder, output = str(model.parent), tmp_path / "out.json"
    arguments = [
        str(model),
        "--text",
        folder,
        "--name",
        "text",
        "python",
        "--segments",
        "2",
        "--length",
        "16",
        "--jobs",
        jobs,
    ]
    arguments += ["--work", str(tmp_path / "work"), "--output", str(output)]
    only = ["rtn:group_size=32", "gptq:group_size=32,samples=4,length=32,texts=text"]
    monkeypatch.setattr(sys, "argv", ["weights.py", *arguments, "--device", "cpu", "--only", *only])
    for _ in range(2):
        weights.main()
    printed = capsys.readouterr()
    assert printed.err.count(": KL ") == 4  # the second run found all rows
    reports = json.loads(output.read_text())["models"]
    assert [report["settings"]["text"] for report in reports.values()] == ["text", "python"]
    kl = [row["kl"]["mean"] for report in reports.values() for row in report["cases"].values()]
    assert len(set(kl)) == 4
    assert all(0 < value < 5 for value in kl)
    assert "| GPTQ, corrected | 4 | 32 | 4 x 32 of text |" in printed.out
