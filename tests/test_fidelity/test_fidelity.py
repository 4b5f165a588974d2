"""Figures of fidelity are what their names say: the same tokens, through the cache, paired, with honest intervals."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny.checkpoints import REFERENCE, tiny_model
from tiny.llama import write_recipe, write_tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.bundle.reader import open_bundle
from kvconvert.bundle.scheme import KVScheme
from kvconvert.convert.export import export
from kvconvert.convert.pipeline import calibrate
from kvconvert.convert.recipe import Recipe
from kvconvert.data.text import load_token_samples
from kvconvert.errors import NumericError, UsageError
from kvconvert.fidelity import evaluate
from kvconvert.fidelity.bootstrap import bootstrap_mean
from kvconvert.fidelity.evaluate import text_figures
from kvconvert.fidelity.recall import NAMES, PASSKEY_CONTEXTS, TABLE_ROWS, DrillBook, agreement, passkey, recitation
from kvconvert.fidelity.scoring import Decoder, batches, compare, generate_greedily
from kvconvert.runtime import KVCache

UNQUANTIZED = KVScheme(key_bits=16, value_bits=16)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE)


@pytest.fixture(scope="module")
def book(tokenizer):
    prose = load_token_samples(None, tokenizer, 2, 1024, 0, "evaluation").ids.flatten().tolist()
    return DrillBook(tokenizer, prose, seed=0)


def with_cache(model, scheme) -> Decoder:
    model.set_attn_implementation("kvconvert")
    return Decoder(model, lambda: KVCache(model.config, scheme))


def random_ids(segments: int, length: int) -> torch.Tensor:
    return torch.randint(4096, (segments, length), generator=torch.Generator().manual_seed(1))


# --- bootstrap


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation_for_many_segments():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5
    interval = bootstrap_mean(values, seed=0)
    half = 1.96 * float(values.std()) / math.sqrt(400)
    assert interval.mean == pytest.approx(float(values.mean()), abs=1e-12)
    # 10,000 resamples leave a Monte Carlo error of about 2 % in each bound's distance.
    assert interval.mean - interval.low == pytest.approx(half, rel=0.08)
    assert interval.high - interval.mean == pytest.approx(half, rel=0.08)
    assert interval == bootstrap_mean(values, seed=0)
    assert interval != bootstrap_mean(values, seed=1)


def test_two_segments_give_the_bounds_that_can_be_counted():
    # Means of two draws from {0, 1}: 0 in a quarter of all cases, 1 in another quarter, so both lie within 95 %.
    interval = bootstrap_mean(torch.tensor([0.0, 1.0]), seed=0)
    assert (interval.low, interval.high) == (0.0, 1.0)
    # At 40 %, three tenths are cut off on either side: more than the quarter at 0 and the quarter at 1.
    narrow = bootstrap_mean(torch.tensor([0.0, 1.0]), seed=0, confidence=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_pairing_finds_a_difference_that_unpaired_intervals_hide():
    level = torch.randn(20, generator=torch.Generator().manual_seed(0)) * 10
    worse = level + 0.1 + 0.01 * torch.randn(20, generator=torch.Generator().manual_seed(1))
    assert bootstrap_mean(worse - level, seed=0).above_zero
    assert bootstrap_mean(worse, seed=0).low < bootstrap_mean(level, seed=0).high


def test_one_segment_has_no_interval_and_nan_is_refused():
    assert bootstrap_mean(torch.tensor([2.0]), seed=0).low is None
    for values in (torch.tensor([1.0, math.nan]), torch.tensor([])):
        with pytest.raises(UsageError):
            bootstrap_mean(values, seed=0)


# --- scoring


def test_figures_equal_a_plain_computation_when_nothing_is_quantized():
    source, other = tiny_model("llama", 0, max_position_embeddings=512), tiny_model("llama", 1)
    ids = random_ids(3, 400)
    result = compare(Decoder.plain(source), {"other": with_cache(other, UNQUANTIZED)}, ids, batch=2)["other"]
    other.set_attn_implementation("sdpa")
    with torch.no_grad():
        p, q = (model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1) for model in (source, other))
    scored = slice(128, 399)
    kl = (p.exp() * (p - q)).sum(-1)[:, scored]
    targets = ids[:, 129:, None]
    assert result.kl.shape == (3, 271)
    # float32 logits of a model whose weights are drawn with deviation 0.1: a few 1e-6 apart.
    torch.testing.assert_close(result.kl, kl, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(result.source_nll, -p[:, scored].gather(-1, targets)[..., 0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(result.other_nll, -q[:, scored].gather(-1, targets)[..., 0], atol=2e-5, rtol=1e-5)
    agrees = p[:, scored].argmax(-1) == q[:, scored].argmax(-1)
    assert (result.agrees == agrees).double().mean() > 0.99, "ties within rounding may fall either way"
    figures = text_figures(result, seed=0)
    assert figures["perplexity"].source == pytest.approx(float(result.source_nll.mean().exp()))
    assert figures["perplexity"].increase == pytest.approx(
        float((result.other_nll.mean() - result.source_nll.mean()).exp()) - 1
    )
    assert figures["kl"].mean == pytest.approx(float(kl.mean()), rel=1e-4)
    share_above = float((kl > figures["kl"].p99).double().mean())
    assert 0.005 < share_above < 0.015


def test_chunks_score_what_token_by_token_decoding_scores():
    model = tiny_model("llama", max_position_embeddings=512)
    decoder = with_cache(model, KVScheme.preset("oscar").with_online_rotation())
    ids = random_ids(1, 270)
    plain = Decoder.plain(tiny_model("llama", max_position_embeddings=512))
    chunked = compare(plain, {"low-bit": decoder}, ids)["low-bit"]
    single = compare(plain, {"low-bit": decoder}, ids, chunk=1)["low-bit"]
    assert float(chunked.kl.mean()) > 1e-4, "two-bit pages must be seen"
    # The same pages, attended to in another order of float32 sums.
    torch.testing.assert_close(chunked.other_nll, single.other_nll, atol=1e-4, rtol=1e-4)
    assert chunked.residual_share == single.residual_share


def test_the_residual_share_counts_what_scored_queries_attend_to():
    decoder = with_cache(tiny_model("llama", max_position_embeddings=512), KVScheme.preset("kivi"))
    result = compare(decoder, {"kivi": decoder}, random_ids(2, 385))["kivi"]
    # Two whole chunks of queries 1 ... 128 tokens into their page, after one and after two quantized pages.
    own = 128 * 129 // 2
    assert result.residual_share == pytest.approx(2 * own / (2 * own + 128 * 128 + 128 * 256))
    plain = Decoder.plain(tiny_model("llama", max_position_embeddings=512))
    assert compare(plain, {"plain": plain}, random_ids(1, 200))["plain"].residual_share == 1


def test_nan_is_refused_instead_of_averaged():
    model = tiny_model("llama")
    model.model.norm.weight.data[0] = math.nan
    with pytest.raises(NumericError, match="broken answers with NaN"):
        compare(Decoder.plain(tiny_model("llama")), {"broken": Decoder.plain(model)}, random_ids(1, 100), prefill=32)


def test_oscar_keeps_more_than_kivi_on_the_reference_model(tokenizer):
    ids = load_token_samples(None, tokenizer, 2, 512, 0, "evaluation").ids
    source = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()
    kivi, oscar = KVScheme.preset("kivi"), KVScheme.preset("oscar").with_online_rotation()
    found = compare(Decoder.plain(source), {"kivi": with_cache(model, kivi), "oscar": with_cache(model, oscar)}, ids)
    assert 0 < float(found["oscar"].kl.mean()) < 0.8 * float(found["kivi"].kl.mean())


# --- generation and drills


def test_greedy_generation_reads_the_cue_after_the_context_was_quantized():
    model = tiny_model("llama", max_position_embeddings=512)
    ids = random_ids(2, 140)
    plain = generate_greedily(Decoder.plain(model), ids[:, :128], ids[:, 128:], 6)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 140:]
    assert torch.equal(plain, expected)
    pages = []

    class Watched(KVCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            pages.append((key_states.shape[2], self.stats().pages))
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    model.set_attn_implementation("kvconvert")
    generate_greedily(Decoder(model, lambda: Watched(model.config, "kivi")), ids[:, :128], ids[:, 128:], 2)
    assert pages[0] == (128, 0)
    assert (12, 4) in pages, "one page of each of two sequences in each of two layers, before the cue is read"


def test_batches_hold_prompts_of_equal_shape_and_every_prompt_once():
    prompts = [([0] * n, [0] * m) for n, m in [(4, 2), (5, 2), (4, 2), (4, 3), (4, 2)]]
    found = list(batches(prompts, size=2))
    assert sorted(i for batch in found for i in batch) == [0, 1, 2, 3, 4]
    assert all(len({tuple(map(len, prompts[i])) for i in batch}) == 1 and len(batch) <= 2 for batch in found)


def test_agreement_counts_tokens_before_the_first_difference():
    first = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4]])
    second = torch.tensor([[1, 2, 3, 4], [1, 2, 7, 4], [1, 2, 3, 4]])
    assert agreement(first, second).tolist() == [4, 2, 0]


def test_passkey_prompts_fill_whole_pages_and_state_the_code_at_its_depth(book, tokenizer):
    drill = book.passkey(512, 0.3)
    text, question = tokenizer.decode(drill.context), tokenizer.decode(drill.cue)
    name = next(name for name in NAMES if name in question)
    stated = f"The secret code of {name} is {drill.expected}."
    assert len(drill.context) == 512
    assert drill.context[0] == tokenizer.bos_token_id
    assert text.count("The secret code of") == 2
    assert abs(text.index(stated) / len(text) - 0.3) < 0.12, "as many tokens, not as many characters, lie before it"
    assert question == f"\nQuestion: what is the secret code of {name}?\nAnswer:"


def code_in(drill, tokenizer) -> str:
    """What a perfect reader answers, found in the prompt itself."""
    name = next(name for name in NAMES if name in tokenizer.decode(drill.cue))
    return tokenizer.decode(drill.context).split(f"The secret code of {name} is ")[1][:5]


def test_passkey_counts_exact_answers_by_length_and_depth(book, tokenizer):
    def perfect(drills, new_tokens):
        return [f" {code_in(drill, tokenizer)}." for drill in drills]

    def shallow(drills, new_tokens):
        # Forgets what was said early, gets one digit wrong or says too many: none of these counts.
        wrong = lambda code: [f" {code[:4]}x", f" {code}1", "", f" about {code}"][int(code) % 4]  # noqa: E731
        return [
            f" {drill.expected}. And" if drill.depth > 0.4 else wrong(code_in(drill, tokenizer)) for drill in drills
        ]

    result = passkey(perfect, shallow, book, max_length=600)
    assert list(result.by_length) == ["256", "512"], "896 tokens do not fit a context of 600"
    assert (result.source, result.bundle) == (1.0, pytest.approx(3 / 5))
    assert result.prompts == 40
    assert {depth: pair[1] for depth, pair in result.by_depth.items()} == {
        "0.1": 0.0, "0.3": 0.0, "0.5": 1.0, "0.7": 1.0, "0.9": 1.0
    }  # fmt: skip
    assert passkey(perfect, perfect, book, max_length=PASSKEY_CONTEXTS[0]).source is None


def test_recitation_counts_rows_once_and_only_on_the_first_line(book, tokenizer):
    def table_in(drill) -> list[tuple[str, str]]:
        last = tokenizer.decode(drill.context).split("\n")[-1]
        return [tuple(row.strip().split(" = ")) for row in last.strip("; ").split(";")]

    def line(rows) -> str:
        return "".join(f"{key} = {value}; " for key, value in rows)

    def perfect(drills, new_tokens):
        return [line(reversed(table_in(drill))) + "\n" for drill in drills]

    def half(drills, new_tokens):
        answers = []
        for drill in drills:
            rows = table_in(drill)
            wrong = (rows[8][0], f"{(int(rows[8][1]) + 1) % 1000:03d}")
            # Eight rows right, one wrong and then corrected, one repeated, one of no table, the rest too late.
            answers.append(line([*rows[:8], wrong, rows[8], rows[0], ("unicorn", "123")]) + "\n" + line(rows[9:]))
        return answers

    result = recitation(perfect, half, book, max_length=1024)
    assert (result.source, result.source_precision) == (1.0, 1.0)
    assert (result.bundle, result.bundle_precision) == (8 / TABLE_ROWS, 8 / 9)
    assert recitation(perfect, perfect, book, max_length=600).source is None


def test_table_prompts_fill_whole_pages(book, tokenizer):
    drill = book.table(512, 16)
    assert len(drill.context) == 512
    assert len(drill.expected) == 16
    assert tokenizer.decode(drill.cue) == "\n"


# --- evaluate


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("source") / "tiny-llama")


def make_bundle(source, folder, method: str, kv: str, more: str = ""):
    recipe = Recipe.load(str(write_recipe(folder / "recipe.toml", method, kv, more)))
    calibrate(str(source), folder / "work", recipe=recipe, samples=1, seq_len=16, progress=False)
    return export(folder / "work", folder / "bundle", force=True, progress=False)


@pytest.fixture(scope="module")
def report(source, tmp_path_factory):
    bundle = make_bundle(source, tmp_path_factory.mktemp("rtn"), "rtn", "oscar")
    return bundle, evaluate(bundle, against=str(source), tokens=300, progress=False)


FIGURES = """
    perplexity.source perplexity.bundle kl.mean kl.p99 top1_agreement passkey.source passkey.bundle recitation.source
    recitation.bundle kv.bits_per_value kv.bytes_per_token weights.bytes weights.bits_per_weight
""".split()  # noqa: SIM905 (names are easier to read so)


def test_the_report_has_the_promised_names_and_is_json(report):
    values = json.loads(json.dumps(report[1].to_dict(), allow_nan=False))
    for name in FIGURES:
        value = values
        for part in name.split("."):
            value = value[part]
        # Tables and free running do not fit 512 positions: null, and the notes say so.
        assert (value is None) == name.startswith("recitation"), name
    assert "recall drills that do not fit" in " ".join(values["notes"])
    assert "leaves 383 scored tokens a segment instead of 512" in " ".join(values["notes"])
    assert values["text"]["scored_tokens"] == 383
    assert 0 < values["kl"]["mean"] < values["kl"]["p99"]
    assert values["passkey"]["prompts"] == 20


def test_sizes_in_the_report_are_those_of_the_files_and_tensors(report, source):
    bundle, figures = report
    tensors, original = load_file(bundle / "model.safetensors"), load_file(source / "model.safetensors")
    parameters = sum(tensor.numel() for tensor in original.values())
    assert figures.weights.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert figures.weights.bits_per_weight == pytest.approx(8 * figures.weights.bytes / parameters)
    # Head size 16: keys 2 bits + 32/32, values 2 bits + 32/16, a 16-bit norm over a head's 16 keys; mean of K and V.
    assert figures.kv.bits_per_value == pytest.approx((2 + 1 + 2 + 2 + 16 / 16) / 2)
    assert figures.kv.bytes_per_token == pytest.approx(figures.kv.bits_per_value / 8 * 2 * 2 * 16)
    assert (figures.kv.tokens, figures.kv.residual_tokens, figures.kv.dtype) == (512, 0, "bfloat16")
    assert figures.kv.source_bytes_per_token == 2 * 2 * 16 * 2
    assert figures.files_digest == open_bundle(bundle).manifest.files_digest()
    assert figures.against.is_recorded_source


def test_a_bundle_that_changes_nothing_loses_nothing(source, tmp_path):
    bundle = make_bundle(source, tmp_path, "none", "kivi", "key_bits = 16\nvalue_bits = 16\n")
    figures = evaluate(bundle, against=str(source), tokens=300, progress=False)
    # The same float32 weights; attention over pages sums in another order.
    assert abs(figures.kl.mean) < 1e-8
    assert figures.top1_agreement > 0.99
    assert figures.perplexity.increase == pytest.approx(0, abs=1e-6)
    assert (figures.kv.bits_per_value, figures.kv.residual_share) == (16, 1)
    assert figures.weights.bytes == figures.weights.source_bytes


def test_a_bundle_without_kv_plan_is_measured_with_the_cache_it_generates_with(source, tmp_path):
    bundle = make_bundle(source, tmp_path, "rtn", "none")
    figures = evaluate(bundle, against=str(source), tokens=300, progress=False)
    assert (figures.kv.bits_per_value, figures.kv.residual_share, figures.kv.bytes_per_token) == (16, 1, 128)
    assert figures.kl.mean > 1e-7


def test_another_source_is_noticed_and_an_absent_one_refused(report, source, tmp_path, monkeypatch):
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
    with pytest.raises(UsageError, match="nothing to score"):
        evaluate(bundle, against=str(source), tokens=0)


def test_equal_runs_report_equal_figures(report, source):
    bundle, figures = report
    assert evaluate(bundle, against=str(source), tokens=300, progress=False) == figures
