"""Speed and memory of a bundle: what is measured, and what is said where nothing can be."""

import io
import json
import os
import shutil
import sys
import time
from dataclasses import replace

import pytest
import torch
from tiny import forked
from tiny.bundle import change_after_verification, edit_json, reseal
from transformers import DynamicCache, LlamaConfig, StaticCache

from kvconvert import KVCache, bench
from kvconvert.benchmark import BenchReport, Measurement, contender, worker
from kvconvert.benchmark.bench import HEADER, table
from kvconvert.benchmark.contender import Contender, PeakMemory, TokenTimes, bytes_per_token, resident_bytes
from kvconvert.errors import BundleError, CheckpointError, KvconvertError, UsageError
from kvconvert.models import CACHE

MODULE = sys.modules["kvconvert.benchmark.bench"]
NUMBERS = 2 * 2 * 16  # of a token: keys and values of two layers with one head of 16


def job(converted, cases, model="bundle", **changed):
    directory = converted / ("bundle" if model == "bundle" else "model")
    values = {"model": model, "directory": str(directory), "tokenizer": str(converted / "bundle"), "device": "cpu"}
    return values | {"dtype": None, "cases": cases, "new_tokens": 3} | changed


def answers(job):
    """What the worker answers to a job, in this process."""
    stream = io.StringIO()
    worker.work(job, stream)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.full
def test_bundle_and_source_are_measured_in_every_case(converted, capfd):
    report = bench(
        converted / "bundle",
        converted / "model",
        contexts=[300, 20],
        batches=[2, 1],
        new_tokens=4,
        device="cpu",
        progress=True,
    )
    assert [(m.batch, m.context, m.model) for m in report.measurements] == [
        (batch, context, model)
        for batch, context in ((1, 20), (2, 20), (1, 300), (2, 300))
        for model in ("bundle", "source")
    ]
    for measured in report.measurements:
        assert measured.failure is None
        assert measured.first_token_seconds > 0
        assert measured.tokens_per_second > 0
        assert measured.dtype == "bfloat16"
        if measured.model == "source" or measured.context == 20:  # fewer tokens than a page are in full precision
            assert measured.kv_bytes_per_token == 2 * NUMBERS
        else:
            assert measured.kv_bytes_per_token < NUMBERS
        assert sys.platform != "linux" or measured.peak_memory > 0
    assert any("on a GPU only" in note for note in report.notes)
    assert report.to_dict() == json.loads(json.dumps(report.to_dict()))
    assert "8 cases" in capfd.readouterr().err  # no bar where nobody looks


def test_times_begin_with_the_call_and_count_tokens_after_the_first(converted, monkeypatch):
    own = Contender("source", converted / "model", converted / "bundle", "cpu", "float32")
    clock = iter([100.0, 100.5, 103.0, 104.0, 105.0, 106.0])

    def generate(ids, max_new_tokens, streamer, **options):
        assert ids.shape == (3, 10)
        if streamer is not None:
            streamer.put(ids)
            for _ in range(max_new_tokens):
                streamer.put(ids[:, 0])
            streamer.end()
        return {CACHE: DynamicCache()}

    monkeypatch.setattr(own.model, "generate", generate)
    monkeypatch.setattr(contender.time, "perf_counter", lambda: next(clock))
    measured = own.measure(batch=3, context=10, new_tokens=4)
    assert measured.first_token_seconds == 3.0
    assert measured.tokens_per_second == 3 * 3 / 3.0
    assert measured.dtype == "float32"


def test_the_streamer_hears_the_prompt_and_each_token_of_generate(converted):
    own = Contender("bundle", converted / "bundle", converted / "bundle", "cpu", None)
    times = TokenTimes()
    cache = own._generate(own._prompts(2, 20), 5, streamer=times)
    assert times.calls == 1 + 5
    assert isinstance(cache, KVCache)
    assert cache.get_seq_length() == 20 + 4


def test_long_prompts_are_read_in_chunks(converted, monkeypatch):
    own = Contender("source", converted / "model", converted / "bundle", "cpu", None)
    monkeypatch.setattr(contender, "ONE_PASS", 100)
    monkeypatch.setattr(contender, "PROMPT_CHUNK", 64)
    lengths = []
    own.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    own._generate(own._prompts(1, 100), 2)
    own._generate(own._prompts(1, 140), 2)
    assert lengths == [100, 1, 64, 64, 12, 1]


def test_rows_of_a_batch_are_different_prose_of_any_length(converted):
    own = Contender("source", converted / "model", converted / "bundle", "cpu", None)
    prompts = own._prompts(4, len(own.text_ids) + 5)
    assert len({tuple(row) for row in prompts.tolist()}) == 4
    assert prompts[0, -5:].tolist() == own.text_ids[:5]


def test_what_fails_is_an_answer_and_the_other_cases_go_on(converted, monkeypatch):
    measure = Contender.measure

    def fails_at_two(self, batch, context, new_tokens):
        if batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        if batch == 3:
            raise ValueError("first line\nsecond line")
        return measure(self, batch, context, new_tokens)

    monkeypatch.setattr(Contender, "measure", fails_at_two)
    first, second, third = (
        answer["measured"] for answer in answers(job(converted, [[1, 8], [2, 8], [3, 8]], model="source"))
    )
    assert first["failure"] is None
    assert second["failure"] == "out of memory"
    assert third["failure"] == "ValueError: first line"


def test_a_model_that_cannot_be_loaded_fails_in_every_case_or_says_why_it_is_refused(converted, monkeypatch):
    def no_memory(*arguments):
        raise MemoryError

    def refuse(*arguments):
        raise BundleError("The bundle is spoilt.")

    monkeypatch.setattr(worker, "Contender", no_memory)
    assert [answer["measured"]["failure"] for answer in answers(job(converted, [[1, 8], [2, 8]]))] == [
        "out of memory"
    ] * 2
    monkeypatch.setattr(worker, "Contender", refuse)
    assert answers(job(converted, [[1, 8]])) == [{"error": "BundleError", "message": "The bundle is spoilt."}]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed, probably for want of memory"),
        ("import sys; sys.stdin.read(); sys.exit(7)", "exit code 7"),
    ],
)
def test_a_process_that_dies_leaves_its_cases_unmeasured(converted, monkeypatch, program, said):
    monkeypatch.setattr(MODULE, "WORKER", (sys.executable, "-c", program))
    measured = list(MODULE._run(job(converted, [[1, 8], [2, 8]])))
    assert [(m.batch, said in m.failure) for m in measured] == [(1, True), (2, True)]
    with pytest.raises(KvconvertError, match=f"Nothing of .* could be measured: .*{said}"):
        bench(converted / "bundle", device="cpu", progress=False)


def test_a_refusal_of_the_other_process_is_raised_in_this_one(converted, monkeypatch):
    answer = json.dumps({"error": "BundleError", "message": "The bundle is spoilt."})
    monkeypatch.setattr(MODULE, "WORKER", (sys.executable, "-c", f"import sys; sys.stdin.read(); print({answer!r})"))
    with pytest.raises(BundleError, match="spoilt"):
        bench(converted / "bundle", device="cpu", progress=False)


def test_without_contexts_the_default_fits_the_models_positions():
    assert MODULE._cases(None, [1], 128, 512) == [(1, 384)]
    assert MODULE._cases(None, [1], 128, 131072) == [(1, 1024)]
    assert MODULE._cases([30, 10, 10], [2, 1], 5, 100) == [(1, 10), (2, 10), (1, 30), (2, 30)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "abacus"}, "`device` may be cpu or cuda"),
        ({"device": "meta"}, "`device` is meta"),
        ({"dtype": "int8"}, "`dtype` is 'int8'; give"),
        ({"new_tokens": 1}, "`new_tokens` is 1"),
        ({"contexts": []}, "`contexts` is"),
        ({"batches": [0]}, "`batches` is"),
        ({"contexts": [500]}, "512 positions; lower `contexts`"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(converted, arguments, said):
    with pytest.raises(UsageError, match=said):
        bench(converted / "bundle", **arguments)


def test_what_is_no_bundle_or_no_source_is_refused_before_anything_is_measured(converted, tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "_run", None)
    with pytest.raises(BundleError):
        bench(converted / "model")
    with pytest.raises(CheckpointError):
        bench(converted / "bundle", converted / "gone")
    odd = shutil.copytree(converted / "bundle", tmp_path / "bundle")
    edit_json(odd / "config.json", use_cache=1)
    reseal(odd)
    with pytest.raises(BundleError, match="use_cache"):
        bench(odd)


def test_bytes_per_token_are_those_of_the_tensors():
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, hidden_size=32)
    keys = torch.zeros(3, 1, 10, 16)
    dynamic, static = DynamicCache(config=config), StaticCache(config=config, max_cache_len=40)
    for layer in range(2):
        dynamic.update(keys, keys, layer)
        static.update(keys, keys, layer)
    assert bytes_per_token(dynamic, 30) == 4 * NUMBERS
    assert bytes_per_token(static, 30) == 4 * NUMBERS * 40 / 10


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the resident set")
def test_peak_memory_sees_what_was_freed_again():
    device, before = torch.device("cpu"), resident_bytes()
    with PeakMemory(device, before) as peak:
        held = torch.ones(2**26)  # 256 MiB
        time.sleep(0.05)
        del held
    # Memory of before may be given back meanwhile.
    assert 0.9 * 2**28 <= peak.bytes < 2**29
    with PeakMemory(device, None) as unknown:
        pass
    assert unknown.bytes is None


def report_of(*measurements, **changed):
    values = {"new_tokens": 4, "device": "some CPU", "against": "model", "versions": {}, "notes": ("a note",)}
    return BenchReport(tuple(measurements), **values | changed)


def test_the_table_shows_every_figure_and_says_what_is_missing():
    measured = Measurement("bundle", 2, 1024, 0.1234, 500.0, 3 * 2**30, 588.4, "bfloat16")
    source = replace(measured, model="source", tokens_per_second=100.0)
    compiled = replace(measured, model="source, compiled", tokens_per_second=200.0)
    failed = Measurement("source", 64, 1024, failure="out of memory")
    report = report_of(measured, source, compiled, failed)
    lines = table(report).splitlines()
    assert lines[0].split("  ")[0] == "batch"
    for words in ("0.123 s", "500.0", "4.00", "3.00 GiB", "588", "2.50x"):  # over the faster source
        assert words in lines[1]
    assert "x" not in lines[2].replace("bfloat16", "")
    assert lines[4].split() == ["64", "1,024", "source", *["-"] * (len(HEADER) - 3)]
    assert "source, 64 x 1024: not measured (out of memory)" in lines
    assert "a note" in lines
    assert "x" not in table(report_of(measured, against=None)).splitlines()[1]


@pytest.mark.parametrize(("batches", "contexts"), [([1, 10**9], [8]), ([10**6], [500, 8])])
def test_what_cannot_fit_the_machines_memory_is_refused_before_anything_is_loaded(
    converted, monkeypatch, batches, contexts
):
    monkeypatch.setattr(MODULE, "_run", lambda job: pytest.fail("a model was loaded"))
    monkeypatch.setattr(MODULE.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}[name])
    with pytest.raises(UsageError, match=r"need [\d,]+ GiB or more, and this machine has 4; lower `batches` or"):
        bench(converted / "bundle", contexts=contexts, batches=batches, new_tokens=4, device="cpu", progress=False)


def test_the_worker_keeps_what_else_is_printed_off_its_answers(tmp_path):
    (tmp_path / "job").write_text('"job"')

    def run():
        for number, name in enumerate(("job", "answers", "said")):
            os.dup2(os.open(tmp_path / name, os.O_RDWR | os.O_CREAT), number)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", 1)
        worker.work = lambda job, answers: (print(job), os.system("echo noise"), print("answer", file=answers))
        worker.main()

    assert forked.wait(forked.start(run)) == 0
    assert (tmp_path / "answers").read_text() == "answer\n"
    assert {"job", "noise"} <= set((tmp_path / "said").read_text().split())


def test_a_bundle_that_changes_while_it_is_measured_has_no_figures(converted, tmp_path, monkeypatch):
    bundle = shutil.copytree(converted / "bundle", tmp_path / "bundle")
    change_after_verification(monkeypatch, MODULE, bundle / "config.json")
    monkeypatch.setattr(MODULE, "_run", lambda job: [Measurement("bundle", 1, 8, 0.1, 9.0, 2**20, 8.0, "bfloat16")])
    with pytest.raises(BundleError, match="changed after it was verified"):
        bench(bundle, contexts=[8], batches=[1], new_tokens=4, device="cpu", progress=False)
