"""The quickstart: its commands work and its figures are the page's within the stated tolerance."""

import subprocess
import sys
from pathlib import Path

import pytest
import quickstart
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvconvert import Recipe, calibrate, export, load
from kvconvert.bundle.reader import open_bundle
from kvconvert.data.sources import EVALUATION
from kvconvert.data.text import load_token_samples
from kvconvert.fidelity.evaluate import decoder_of
from kvconvert.fidelity.report import measure_cache
from kvconvert.fidelity.scoring import Decoder, compare
from kvconvert.io.tensorheader import nbytes, read_header
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods.awq import auto_kept_share

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quickstart.md"
MODEL = ROOT / quickstart.MODEL


@pytest.mark.parametrize(
    ("weights", "samples", "length", "tokens", "kl"),
    [
        ("rtn", 2, 128, 300, 2),
        pytest.param("awq", 24, 256, 1024, quickstart.TOLERANCE["KL"], marks=pytest.mark.full),
    ],
)
def test_a_small_conversion_of_the_reference_model_has_the_pages_sizes_and_divergence(
    tmp_path, monkeypatch, weights, samples, length, tokens, kl
):
    """At most a fifth of the calibration tokens of the quickstart and a ninth of its text: with fewer, and weights that
    are merely rounded, KL is only kept from being a multiple of the page's.
    """
    monkeypatch.setitem(quickstart.TOLERANCE, "KL", kl)
    kept = auto_kept_share(AutoConfig.from_pretrained(MODEL).hidden_size)  # what "auto" weights keep
    recipe = Recipe.load("default", {"weights.method": weights, "weights.kept_share": kept})
    calibrate(MODEL, tmp_path / "work", recipe=recipe, samples=samples, seq_len=length, progress=False)
    manifest = open_bundle(export(tmp_path / "work", tmp_path / "bundle", progress=False)).manifest
    model, tokenizer = load(tmp_path / "bundle", dtype=torch.float32)
    source = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = load_token_samples(EVALUATION, tokenizer, 1, tokens, 0).ids
    decoder = decoder_of(model)
    scored = compare(Decoder.plain(source), {"bundle": decoder}, ids, PAGE_SIZE)["bundle"]
    cache = measure_cache(decoder, ids, 2048, 2048, torch.bfloat16, None)  # as many as the model has positions
    source_bytes = sum(nbytes(info) for info in read_header(MODEL / "model.safetensors").values())
    rows = [
        ("KL", "KL divergence from the source, mean", "0", f"{float(scored.kl.mean()):.4f}"),
        ("cache", "KV cache, bytes per token", f"{cache.source_bytes_per_token:.0f}", f"{cache.bytes_per_token:.0f}"),
        ("bytes", "weights, bytes", f"{source_bytes}", f"{manifest.weights.bytes}"),
    ]
    assert quickstart.compare(PAGE, rows) == []


def test_the_page_shows_the_commands_that_the_quickstart_runs():
    block = PAGE.read_text(encoding="utf8").split(quickstart.BEGIN)[1].split(quickstart.END)[0]
    shown = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    assert shown == [" ".join(["kvconvert", *command]) for command in quickstart.COMMANDS]


@pytest.mark.full
def test_the_quickstarts_output_is_the_pages():
    command = [sys.executable, "examples/quickstart.py", "--check", "docs/quickstart.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Greedy continuation" in done.stdout
