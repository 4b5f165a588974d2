"""What `benchmarks/weights.py` measures is the model that a conversion makes."""

import json
import sys
from pathlib import Path

import processes
import pytest
import torch
import weights
from safetensors.torch import load_file, save_file
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
    assert "Bits 4; group size 32." in printed.out
    assert "| GPTQ, corrected | 4 x 32 of text |" in printed.out


def test_another_programs_weights_are_measured_on_the_same_ids(model, tmp_path, monkeypatch, capsys):
    """A program that keeps every weight, but for one matrix, which it sets to 0."""
    seen = {}

    def program(command, environment, timeout=None):
        assert command[0] == "/peer/python"
        assert command[1].endswith("calibrate_peers/llm_compressor.py")
        if command[2] == "quantize":
            seen["ids"] = load_file(command[4])["ids"]
            seen["settings"] = json.loads(Path(command[6]).read_text())
            return {"wall_s": 1.0}, 'a line of its own\n{"import_s": 1}\n'
        source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
        source["model.layers.0.mlp.down_proj.weight"].zero_()
        save_file({name: tensor for name, tensor in source.items() if name != "lm_head.weight"}, command[4])
        return {}, ""

    monkeypatch.setattr(processes, "run", program)
    case = "llm-compressor/gptq:bits=3,group_size=32,samples=4,length=32"
    common = [str(model), "--text", str(model.parent), "--name", "text", "--segments", "2", "--length", "16"]
    common += ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "out.json"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["weights.py", *common, "--only", case])
    with pytest.raises(SystemExit, match="--peer-python has to name the Python of llm-compressor"):
        weights.main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--peer-python", "llm-compressor=/peer/python"])
    weights.main()
    assert seen["ids"].shape == (4, 32)
    assert (seen["settings"]["method"], seen["settings"]["bits"], seen["settings"]["group_size"]) == ("gptq", 3, 32)
    (row,) = json.loads((tmp_path / "out.json").read_text())["models"]["model"]["cases"].values()
    assert row["kl"]["mean"] > 0
    assert "| llm-compressor GPTQ | " in capsys.readouterr().out
