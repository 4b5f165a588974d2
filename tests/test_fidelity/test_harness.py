"""Tasks of lm-evaluation-harness are answered through the low-bit cache, offline with a task file of our own."""

import json
import sys

import pytest
import torch
from click.testing import CliRunner
from tiny.bundle import write_tiny_bundle
from tiny.checkpoints import REFERENCE, tiny_model
from transformers import AutoTokenizer

from kvconvert import KVCache, KVScheme
from kvconvert.cli import cli
from kvconvert.fidelity import check_tasks
from kvconvert.fidelity.scoring import Decoder, feed

TASK = """
task: ours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
"""
GENERATION = (
    TASK
    + 'doc_to_target: "{{{{answer}}}}"\ngeneration_kwargs: {options}\n'
    + ("metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]\n")
)


def test_without_lm_eval_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    write_tiny_bundle(tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "kvconvert.fidelity.harness", raising=False)
    result = CliRunner().invoke(cli, ["eval", str(tmp_path), "--harness", "arc_easy"])
    assert result.exit_code == 1
    assert "pip install '.[harness]'" in result.stderr
    result = CliRunner().invoke(cli, ["eval", str(tmp_path), "--harness", "ours.yaml", "--tokens", "5"])
    assert "--tokens does not apply to --harness" in result.stderr


def test_a_name_that_no_task_of_lm_eval_has_is_refused_before_it_is_imported(monkeypatch, tmp_path):
    (tmp_path / "lm_eval" / "tasks" / "arc").mkdir(parents=True)
    (tmp_path / "lm_eval" / "__init__.py").write_text("raise AssertionError")
    (tmp_path / "lm_eval" / "tasks" / "arc" / "arc.yaml").write_text("task: arc_easy\ntag: [ai2_arc]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    assert check_tasks(["arc_easy", "ai2_arc", "mmlu_*"]) == []
    write_tiny_bundle(tmp_path / "bundle")
    result = CliRunner().invoke(cli, ["eval", str(tmp_path / "bundle"), "--harness", "arc_easy,arc_medium"])
    assert (result.exit_code, "has no task 'arc_medium'; name another" in result.stderr) == (2, True)


@pytest.fixture
def lm():
    """Makes the harness's view of a tiny model, with a cache of a scheme."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install '.[harness]'")
    from kvconvert.fidelity.harness import CachedLM

    model = tiny_model("llama", 0, max_position_embeddings=512)
    model.set_attn_implementation("kvconvert")
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    return lambda scheme: CachedLM(Decoder(model, lambda: KVCache(model.config, scheme)), tokenizer, 2, False)


def test_likelihoods_are_those_of_tokens_read_one_by_one_through_the_cache(lm):
    low = lm(KVScheme(key_bits=1, value_bits=1))
    ids = torch.randint(4096, (2, 270), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [(None, row[:262], row[262:]) for row in ids]
    found = low._loglikelihood_tokens(requests)
    with torch.no_grad():
        for (score, greedy), row in zip(found, ids, strict=True):
            cache = low.decoder.new_cache()
            parts = [row[:128], row[128:256], *([token] for token in row[256:])]
            logits = [feed(low.decoder, cache, torch.tensor([part])).logits[0, -1] for part in parts]
            scores = torch.stack(logits[-9:-1]).log_softmax(-1)
            # Chunks sum in another order, which can move a code to its neighbour.
            assert score == pytest.approx(float(scores[range(8), row[262:]].sum()), abs=0.02)
            assert not greedy
    exact = lm(KVScheme(key_bits=16, value_bits=16))._loglikelihood_tokens(requests)
    assert all(abs(one[0] - two[0]) > 0.1 for one, two in zip(found, exact, strict=True))


def test_a_long_text_is_scored_in_windows_of_the_models_positions(lm):
    from lm_eval.api.instance import Instance

    model = lm(KVScheme(key_bits=16, value_bits=16))
    model.max_length = size = 48
    text = "It was a dark night, and the old house stood still. " * 10
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    (found,) = model.loglikelihood_rolling([request], disable_tqdm=True)
    ids, expected = [model.prefix_token_id, *model.tok_encode(text)], 0.0
    assert len(ids) > 2 * size
    assert (len(ids) - 1) % size, "the last window would be as long as the others"
    for start in range(0, len(ids) - 1, size):
        stop = min(start + size, len(ids) - 1)
        window = ids[max(0, stop - size) : stop + 1]  # all of it is read, and what no window before it had is scored
        with torch.no_grad():
            scores = model.decoder.model(torch.tensor([window[:-1]])).logits[0].log_softmax(-1)
        each = scores.gather(1, torch.tensor(window[1:])[:, None]).flatten()
        expected += float(each[start - stop :].sum())
    assert found == pytest.approx(expected, rel=1e-4)


def run(lm, tmp_path, task: str, **values):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text, "answer": values["answer"]}) + "\n" for text in values["texts"]))
    file = tmp_path / "ours.yaml"
    file.write_text(task.format(rows=rows, kind=values["kind"], options=values.get("options")))
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(lm, tasks=[str(file)], task_manager=manager, log_samples=True, bootstrap_iters=0)
    return found["samples"]["ours"]


def test_a_task_file_is_generated_and_cut_at_its_stop_strings(lm, tmp_path):
    model = lm(KVScheme())
    task = {"kind": "generate_until", "texts": ["It was a dark night"], "answer": "x"}
    (whole,) = run(model, tmp_path, GENERATION, options="{until: [], max_gen_toks: 6}", **task)
    text = whole["resps"][0][0]
    assert len(model.tok_encode(text, add_special_tokens=False)) >= 4
    (cut,) = run(model, tmp_path, GENERATION, options=f"{{until: [{json.dumps(text[5])}], max_gen_toks: 6}}", **task)
    assert cut["resps"][0][0] == text[: text.index(text[5])]


def test_sampling_is_refused_by_name(lm, tmp_path):
    from kvconvert.errors import UsageError

    task = {"kind": "generate_until", "texts": ["It was"], "answer": "x"}
    with pytest.raises(UsageError, match="do_sample = True"):
        run(lm(KVScheme()), tmp_path, GENERATION, options="{until: [], do_sample: true, temperature: 0.7}", **task)
    with pytest.raises(UsageError, match="repetition_penalty"):
        run(lm(KVScheme()), tmp_path, GENERATION, options="{until: [], repetition_penalty: 2.0}", **task)


def test_a_task_whose_data_cannot_be_fetched_is_one_sentence_before_a_model_is_loaded(lm, tmp_path, monkeypatch):
    from kvconvert.fidelity import harness

    monkeypatch.setattr(harness, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
    write_tiny_bundle(tmp_path / "bundle")
    file = tmp_path / "ours.yaml"
    file.write_text(TASK.format(rows=tmp_path / "nowhere.jsonl", kind="loglikelihood"))
    result = CliRunner().invoke(cli, ["eval", str(tmp_path / "bundle"), "--harness", str(file)])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: lm-evaluation-harness cannot load the data of")
    assert "connect to the Hub" in result.stderr


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (GENERATION, "task: [", "ParserError: while parsing a flow node"),
        (GENERATION, "- a", "ValueError: Expected YAML dict"),
        ("test_split: test", "test_split: tset", "KeyError: 'tset'"),
        ("{{{{text}}}}", "{{{{txet}}}}", "UndefinedError: 'txet' is undefined"),
        ("doc_to_text", "nonsense: 1\ndoc_to_text", "unexpected keyword argument 'nonsense'"),
        ("doc_to_text", "include: gone.yaml\ndoc_to_text", "FileNotFoundError: [Errno 2]"),
    ],
)
def test_a_task_file_that_the_harness_does_not_understand_is_one_sentence(lm, tmp_path, before, after, said):
    write_tiny_bundle(tmp_path / "bundle")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "It was", "answer": "x"}\n')
    file = tmp_path / "ours.yaml"
    file.write_text(GENERATION.replace(before, after).format(rows=rows, kind="generate_until", options="{until: []}"))
    result = CliRunner().invoke(cli, ["eval", str(tmp_path / "bundle"), "--harness", str(file)])
    last = result.stderr.splitlines()[-1]
    assert result.exit_code == 1
    assert last.startswith(f"Error: lm-evaluation-harness cannot use the task {file} (")
    assert said in last
    assert last.endswith("; correct its file, install what it needs, or name another.")


def test_git_is_not_asked_for_the_commit_of_the_current_directory(lm, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run(
        lm(KVScheme()), tmp_path, GENERATION, kind="generate_until", texts=["It was"], answer="x", options="{until: []}"
    )
    assert "fatal" not in capfd.readouterr().err
