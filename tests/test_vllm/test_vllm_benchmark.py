"""`benchmarks/vllm_serving.py` measures what it says, with a stand-in for vLLM whose steps take ten milliseconds."""

import cProfile
import json

import pytest
import vllm_process
import vllm_serving
from vllm_serving import Contender, answer_tokens, requests_of, write_model

STEP = 0.01


class OneStepEach:
    """Reads a prompt in each step, beside which requests whose prompts were read before answer."""

    blocks, block_tokens = 1000, 128

    def __init__(self):
        self.limits, self.watched = [], []

    def serve(self, requests, arrivals, sampling):
        told = [[STEP * (first + 1 + i) for i in range(answer)] for first, (_, answer) in enumerate(requests)]
        return told, max(times[-1] for times in told)

    def limit(self, blocks):
        self.limits.append(blocks)

    def kill(self):
        pass

    def profile(self, what):
        self.watched.append(what)
        return [[1.0, 2, "kernel"]]


@pytest.fixture
def contender():
    made = Contender("bf16", 30, 60, [([5] * 10, 4), ([5] * 20, 7), ([5] * 30, 2)], True, {})
    made.vllm = OneStepEach()
    return made


def test_tokens_are_timed_while_all_rows_answer(contender):
    # The last of 16 prompts is read in step 16, and the first row is the first to end.
    found = contender._run("16x12000")
    assert found["rows"] == 16
    assert (found["first_ms"], found["token_ms"]) == (160, 10)
    assert found["tokens_per_second"] == pytest.approx(1600)
    assert answer_tokens(16, 1500) == 1 + 64 + 15


def test_as_many_rows_are_asked_as_the_cache_holds(contender):
    rows = contender._run("fullx65536")["rows"]
    each = -(-(8192 + answer_tokens(rows, 8192)) // 128)
    assert rows * each < OneStepEach.blocks <= (rows + 1) * each + each
    assert len(requests_of(rows, 8192)) == rows


def test_the_mixed_load_tells_prompts_from_what_comes_after(contender):
    found = contender._run("mixed-6")
    assert contender.vllm.limits == [200, 1000]
    # Three prompts, then the rest of the second answer, which is the last to end.
    assert (found["prompts_s"], found["seconds"], found["further_passes"]) == (0.03, 0.08, 5)


def test_cases_of_other_contenders_are_left_out(contender):
    report = {}
    contender.measure(["bf16/1x1000", "bundle/1x1000", "16x12000"], report, lambda: None)
    assert list(report) == ["1x1000", "16x12000"]


def test_nothing_is_served_before_the_mixed_load_that_is_to_be_the_first(contender, monkeypatch):
    served = []
    made = OneStepEach()
    made.ready_seconds = 1.0
    monkeypatch.setattr(made, "serve", lambda *asked: served.append(asked) or OneStepEach.serve(made, *asked))
    monkeypatch.setattr(vllm_serving, "VLLM", lambda *_: made)
    contender.vllm, report = None, {}
    contender.measure(["first-mixed", "mixed"], report, lambda: None)
    assert served[0][0] == contender.mixed
    assert report["first-mixed"] == report["mixed"]
    assert "warm_s" not in report
    # Steps of many rows come before the second one, and prompts before any other first case.
    assert [len(asked[0]) for asked in served] == [3, 20, 3]
    contender.measure(["mixed"], report, lambda: None)
    assert [len(asked[0]) for asked in served[3:]] == [2, 20, 3]
    assert "warm_s" in report


def test_a_hybrid_has_the_layers_that_its_shape_says(tmp_path):
    config = json.loads((write_model(tmp_path, "hybrid", {}) / "config.json").read_text())
    assert len(config["layer_types"]) == config["num_hidden_layers"] == 32
    assert config["layer_types"].count("full_attention") == 8


def test_what_a_child_says_that_does_not_reply_is_told(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("KVCONVERT_VLLM_PYTHON", raising=False)
    script = tmp_path / "script.py"
    script.write_text("print('the core has ended')\nraise SystemExit(3)\n")
    assert vllm_process.child(script, {}) == {"failed": 3}
    assert "the core has ended" in capfd.readouterr().err


def test_a_case_is_watched_from_its_begin_to_its_end(contender):
    found = contender._run("kernels:1x1000")
    assert contender.vllm.watched == ["kernels", ""]
    assert found["kernels"] == [[1.0, 2, "kernel"]]
    assert found["first_ms"] == 10


def test_what_took_the_most_is_told_first():
    def work():
        return sorted(range(100_000), key=lambda x: -x)

    watched = cProfile.Profile()
    watched.enable()
    work()
    (whole, calls, name), *rows = vllm_process._told(watched)
    assert name == "all"
    assert calls == sum(row[1] for row in rows) > 100_000
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), reverse=True)
    assert whole == pytest.approx(sum(row[0] for row in rows), rel=0.01, abs=0.01)
