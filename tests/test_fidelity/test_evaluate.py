"""One evaluation of a bundle: the figures that it reports are those of its files, its cache and the same source."""

import json
import re
import shutil
import sys

import pytest
from safetensors.torch import load_file
from tiny.bundle import change_after_verification
from tiny.llama import write_recipe, write_tiny_llama
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from kvconvert import Recipe, calibrate, evaluate, export
from kvconvert.bundle.figures import fidelity_rows
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import BundleError, DataError, UsageError
from kvconvert.fidelity.report import table


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("source") / "tiny-llama")


def make_bundle(source, folder, method: str, kv: str, more: str = ""):
    recipe = Recipe.load(str(write_recipe(folder / "recipe.toml", method, kv, more)))
    calibrate(str(source), folder / "work", recipe=recipe, samples=1, seq_len=16, progress=False)
    return export(folder / "work", folder / "bundle", force=True, progress=False)


@pytest.fixture(scope="module")
def report(source, tmp_path_factory):
    bundle = make_bundle(source, tmp_path_factory.mktemp("rtn"), "rtn", "oscar-paper")
    return bundle, evaluate(bundle, against=str(source), tokens=300, progress=False)


FIGURES = """
    perplexity.source perplexity.bundle kl.mean kl.p99 kl.p999 top1_agreement retrieval.source retrieval.bundle
    free_running.agreement_tokens kv.bits_per_value kv.bytes_per_token weights.bytes weights.bits_per_weight
""".split()  # noqa: SIM905 (names are easier to read so)


def test_the_report_has_the_promised_names_and_is_json(report):
    values = json.loads(json.dumps(report[1].to_dict(), allow_nan=False))
    for name in FIGURES:
        value = values
        for part in name.split("."):
            value = value[part]
        # Free running does not fit 512 positions: null, and the notes say so.
        assert (value is None) == name.startswith("free_running"), name
    assert "prompts of free-running that do not fit the context were left out" in values["notes"]
    # Random weights answer nothing, in the one prompt of each probe that goes with 300 tokens.
    assert {(p["source"], p["bundle"], p["kept"], p["prompts"]) for p in values["probes"].values()} == {
        (0, None, None, 1)
    }
    assert {p["tokens"] for p in values["probes"].values()} == {256}, "two pages, and room for question and answers"
    assert values["verdict"].startswith("Not judged: continuing text, ")
    told = "the model has a context of 512 tokens, which leaves 383 scored tokens a segment, fewer than the 512 wanted"
    assert told in values["notes"]
    assert "images" not in values["parts"], "the model reads text alone"
    assert values["text"]["scored_tokens"] == 300
    assert 0 < values["kl"]["mean"] < values["kl"]["p99"] < values["kl"]["p999"]
    assert list(values["retrieval"]["by_length"]) == ["128", "256", "384"]
    assert values["retrieval_form"] == "plain text"
    assert (values["compute_dtype"], values["noise"]) == ("float32", None)


def test_sizes_in_the_report_are_those_of_the_files_and_tensors(report, source):
    bundle, figures = report
    tensors, original = load_file(bundle / "model.safetensors"), load_file(source / "model.safetensors")
    parameters = sum(tensor.numel() for tensor in original.values())
    assert figures.weights.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert figures.weights.bits_per_weight == pytest.approx(8 * figures.weights.bytes / parameters)
    # Head size 16: keys 2 bits + 32/32, values 2 bits + 32/16, a 16-bit norm over a head's 16 keys; mean of K and V.
    in_pages, lengths = (2 + 1 + 2 + 2 + 16 / 16) / 2, range(385, 513)
    bits = sum(in_pages * (n - n % 128) + 16 * (n % 128) for n in lengths) / sum(lengths)
    assert (figures.kv.context, figures.kv.bits_per_value) == (512, pytest.approx(bits))
    assert figures.kv.bytes_used == 512 * 2 * 2 * 16 * in_pages / 8
    assert figures.kv.bytes_per_token == pytest.approx(figures.kv.bits_per_value / 8 * 2 * 2 * 16)
    assert (figures.kv.tokens, figures.kv.residual_tokens, figures.kv.dtype) == (512, 0, "bfloat16")
    assert figures.kv.source_bytes_per_token == 2 * 2 * 16 * 2
    assert figures.files_digest == open_bundle(bundle).manifest.files_digest()
    assert figures.against.is_recorded_source


def test_a_bundle_that_changes_nothing_loses_nothing(source, tmp_path):
    bundle = make_bundle(source, tmp_path, "none", "kivi", "key_bits = 16\nvalue_bits = 16\nsink_tokens = 0\n")
    figures = evaluate(bundle, against=str(source), tokens=300, progress=False)
    # The same float32 weights; attention over pages sums in another order.
    assert abs(figures.kl.mean) < 2e-8
    assert figures.top1_agreement > 0.99
    assert figures.perplexity.increase == pytest.approx(0, abs=1e-6)
    assert (figures.kv.bits_per_value, figures.kv.residual_share) == (16, 1)
    assert figures.weights.bytes == figures.weights.source_bytes


def test_a_bundle_without_kv_plan_is_measured_with_the_cache_it_generates_with(source, tmp_path):
    bundle = make_bundle(source, tmp_path, "rtn", "none")
    figures = evaluate(bundle, against=str(source), tokens=300, progress=False)
    assert (figures.kv.bits_per_value, figures.kv.residual_share, figures.kv.bytes_per_token) == (16, 1, 128)
    assert figures.kl.mean > 1e-7


def test_another_source_is_noticed_and_an_absent_one_refused(report, source, tmp_path, monkeypatch, capsys):
    bundle, _ = report
    other = tmp_path / "other"
    shutil.copytree(source, other)
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(other)
    figures = evaluate(bundle, against=str(other), tokens=10, progress=False)
    assert not figures.against.is_recorded_source
    assert "not the checkpoint that the manifest records" in " ".join(figures.notes)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="give its path as `against`"):
        evaluate(bundle, progress=False)
    with pytest.raises(UsageError, match="`tokens` is 0; give a whole number of at least 1"):
        evaluate(bundle, against=str(source), tokens=0)
    with pytest.raises(UsageError, match="'speed' is not a part"):
        evaluate(bundle, against=str(source), only=["kl", "speed"])
    capsys.readouterr()
    with pytest.raises(UsageError, match="`context` is 513, more than the 512 positions"):
        evaluate(bundle, against=str(source), context=513)
    with pytest.raises(UsageError, match=r"`context` is 64; .* take at least 256"):
        evaluate(bundle, against=str(source), context=64)
    with pytest.raises(UsageError, match="reads text alone, so leave images out"):
        evaluate(bundle, against=str(source), only=["images"])
    foreign = shutil.copytree(source, tmp_path / "foreign")
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config | {"vocab_size": 5000}))
    with pytest.raises(UsageError, match="foreign has a vocabulary of 5,000 tokens, the bundle one of"):
        evaluate(bundle, against=str(foreign))
    assert not capsys.readouterr().err, "nothing was hashed or loaded before"
    with pytest.raises(UsageError, match="a context of 256 tokens holds no prompt of probes"):
        evaluate(bundle, against=str(source), context=256, tokens=300, only=["probes"], progress=False)
    with pytest.raises(UsageError, match="`drawings` is 0; give a whole number of at least 1"):
        evaluate(bundle, against=str(source), drawings=0)


def test_equal_runs_report_equal_figures_and_without_progress_nothing_is_shown(report, source, capfd):
    bundle, figures = report
    logging.enable_progress_bar()
    assert evaluate(bundle, against=str(source), tokens=300, progress=False) == figures
    assert "Loading" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()


def test_parts_can_be_chosen_and_16_bit_dtypes_tell_their_noise(report, source):
    bundle, whole = report
    figures = evaluate(bundle, str(source), tokens=300, only=["kl"], dtype="bfloat16", progress=False)
    assert figures.parts == ("kl",)
    unmeasured = (figures.perplexity, figures.top1_agreement, figures.retrieval, figures.kv, figures.weights)
    assert unmeasured == (None,) * 5
    # Far below what quantization costs.
    assert abs(figures.noise.kl) < figures.kl.mean / 10
    assert (figures.noise.tokens, figures.noise.what) == (511, "the source in bfloat16 from the source in float32")
    assert figures.kl.mean == pytest.approx(whole.kl.mean, rel=0.1)
    assert [row.split()[0] for row in table(figures).splitlines()[1:4]] == ["KL", "KL,", "KL"]


def test_less_is_measured_unless_everything_is_asked_for(report, source, capsys):
    bundle, whole = report
    less = evaluate(bundle, str(source), tokens=300, full=False)
    assert set(whole.parts) - set(less.parts) == {"probes", "free-running"}
    assert (less.kl, less.retrieval) == (whole.kl, whole.retrieval)
    said = capsys.readouterr().err
    steps = ("Verifying ", "Loading it", "Timing ", "Measuring perplexity, kl, top1, retrieval, cache, weights: about")
    assert [step for line in said.splitlines() for step in steps if line.startswith(step)] == [*steps]
    named = evaluate(bundle, str(source), tokens=300, full=False, only=["probes"], progress=False)
    assert named.parts == ("probes",)


def test_a_longer_context_is_read_page_by_page(report, source):
    bundle, whole = report
    figures = evaluate(bundle, str(source), tokens=500, context=256, only=["perplexity"], progress=False)
    assert (figures.text.prefill, figures.text.scored_per_segment, figures.text.scored_tokens) == (128, 127, 4 * 127)
    assert whole.text.scored_per_segment == 300
    told = "you asked for a context of 256 tokens, which leaves 127 scored tokens a segment, fewer than the 512 wanted"
    assert told in figures.notes
    assert re.search(r"\n508 tokens of .+ scored: whole segments, 127 of each after 128 read first\n", table(figures))


def test_a_person_reads_some_twenty_rows_and_what_the_bundle_is_fit_for(report):
    rows = table(report[1]).splitlines()
    assert 14 <= rows.index("") <= 20
    assert rows[rows.index("") + 1] == report[1].verdict
    assert sum("the source cannot do it" in row for row in rows) == 6
    assert rows[1].split()[:3] == [
        "perplexity",
        *(f"{x:,.2f}" for x in (report[1].perplexity.source, report[1].perplexity.bundle)),
    ]


def test_the_context_is_named_as_it_was_asked_for_where_a_prompt_is_compressed_whole(source, tmp_path):
    bundle = make_bundle(source, tmp_path, "none", "minikv")
    figures = evaluate(bundle, str(source), tokens=64, context=256, only=["kl"], progress=False)
    assert figures.notes[0].startswith("you asked for a context of 256 tokens, which leaves 128 scored tokens")


def test_the_shortest_context_is_scored_through_a_page(source, tmp_path):
    bundle = make_bundle(source, tmp_path, "none", "oscar")
    figures = evaluate(bundle, str(source), tokens=100, context=256, only=["kl", "cache"], progress=False)
    assert figures.kv.residual_share < 0.9
    assert figures.kl.mean > 1e-6  # weights are kept, so that all of it is the cache's


def test_a_bundle_that_changes_between_verification_and_loading_is_not_measured(report, source, tmp_path, monkeypatch):
    bundle = shutil.copytree(report[0], tmp_path / "bundle")
    change_after_verification(monkeypatch, sys.modules["kvconvert.fidelity.evaluate"], bundle / "model.safetensors")
    with pytest.raises(BundleError, match="changed after it was verified"):
        evaluate(bundle, against=str(source), tokens=10, progress=False)


def test_too_little_text_is_refused_before_anything_is_loaded(report, source, tmp_path, monkeypatch):
    module = sys.modules["kvconvert.fidelity.evaluate"]
    monkeypatch.setattr(module, "load", lambda *args, **kwargs: pytest.fail("the bundle was loaded"))
    (tmp_path / "short.txt").write_text("Once upon a time")
    with pytest.raises(DataError, match=r"short.txt holds .* give more text, or a smaller `context`"):
        evaluate(report[0], str(source), data=tmp_path / "short.txt", progress=False)


def test_counts_of_one_are_in_the_singular():
    report = {
        "retrieval": {"prompts": 1, "source": 1.0, "bundle": 0.0},
        "free_running": {"generated": 16, "prompts": 1, "agreement_tokens": 3.0},
        "probes": {"json": {"ability": "looking up", "source": 1.0, "bundle": 0.0, "answers": 1}},
        "images": {"drawings": 1, "kl": 0.1},
    }
    assert [row[-1] for row in fidelity_rows(report)] == ["1 prompt", "of 16, 1 text", "1 answer", "1 image"]
