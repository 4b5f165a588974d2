"""benchmarks/calibrate.py: what is measured is kvconvert's own conversion, and the page says what the report holds."""

import sys
from types import SimpleNamespace

import calibrate
import processes
import pytest
import torch
from click.testing import CliRunner
from tiny.checkpoints import save_checkpoint, save_text
from transformers import AutoModelForCausalLM

from kvconvert.cli import cli
from kvconvert.runtime import load


@pytest.fixture
def settings(tmp_path):
    return SimpleNamespace(
        model=save_checkpoint(tmp_path / "source"),
        samples=4,
        length=32,
        seed=0,
        calibration=save_text(tmp_path),
        bits=4,
        group_size=32,
        device="cpu",
        threads=1,
        peer_python=tmp_path / "none",
        peer_batch=1,
        peer_dtype="auto",
        timeout=60,
    )


def test_what_kvconvert_saved_is_read_back_as_its_bundle(settings, tmp_path, monkeypatch):
    def here(command, environment, timeout):
        """The same command in this process, which spares its start."""
        assert command[:3] == [sys.executable, "-m", "kvconvert"]
        done = CliRunner().invoke(cli, command[3:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return {"wall_s": 1.0, "processor_s": 2.0, "peak_anonymous_bytes": 300}, done.stdout

    monkeypatch.setattr(processes, "run", here)
    place = tmp_path / "case"
    found = calibrate.run("kvconvert", "awq", settings, tmp_path / "ids", place)
    assert (found["wall_s"], found["processor_s"], found["peak_anonymous_bytes"]) == (1.0, 2.0, 300)
    saved = calibrate.saved_model("kvconvert", settings, place)
    served, _ = load(place / "model", dtype=torch.float32)
    ids = torch.arange(2, 34)[None]
    with torch.no_grad():
        torch.testing.assert_close(saved(ids).logits, served(ids).logits, atol=2e-3, rtol=1e-3)
        source = AutoModelForCausalLM.from_pretrained(settings.model)(ids).logits
    assert not torch.allclose(saved(ids).logits, source, atol=0.05)


def test_a_process_is_measured_and_its_failure_told():
    measured, said = processes.run([sys.executable, "-c", "print('done')"])
    assert said == "done\n"
    assert measured["wall_s"] >= 0
    with pytest.raises(SystemExit, match="no such thing"):
        processes.run([sys.executable, "-c", "raise OSError('no such thing')"])
    with pytest.raises(SystemExit, match="took longer than 0 s"):
        processes.run([sys.executable, "-c", "import time; time.sleep(30)"], timeout=0.1)
