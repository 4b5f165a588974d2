"""Probes: what is asked for stands once in what is read, an answer counts as greedy generation would give it."""

import types

import pytest
import torch
from tiny.checkpoints import REFERENCE, tiny_model
from transformers import AutoTokenizer

from kvconvert import KVCache, KVScheme
from kvconvert.data.sources import EVALUATION
from kvconvert.data.text import load_token_samples
from kvconvert.fidelity.probes import (
    ASKED,
    JSON,
    PILOT,
    PROBES,
    ProbePrompt,
    ProbeResult,
    Writer,
    abilities,
    ask,
    losses,
    measure_probes,
    probe_tokens,
    verdict,
)
from kvconvert.fidelity.retrieval import RetrievalResult
from kvconvert.fidelity.scoring import Decoder, generate_greedily
from kvconvert.models import CACHE

CHAT = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module", params=["plain text", "chat template"])
def writer(request):
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    prose = load_token_samples(EVALUATION, tokenizer, 2, 1024, 0).ids.flatten().tolist()
    tokenizer.chat_template = CHAT if request.param == "chat template" else None
    return Writer(tokenizer, prose, seed=0)


@pytest.mark.each_value
@pytest.mark.parametrize("length", [260, 772])
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_what_is_asked_for_stands_once_in_what_is_read(writer, probe, length):
    for prompt in writer.prompts(probe, length, 3):
        assert (prompt.read, len(prompt.answers)) == (length, ASKED)
        read = writer.tokenizer.decode(prompt.ids[:length])
        for start, stop in prompt.answers:
            assert start > prompt.read
            expected = writer.tokenizer.decode(prompt.ids[start:stop]).strip()
            assert len(expected) > 4
            assert read.count(expected) == 1, expected
            # The question, and the answers before, do not say it.
            assert expected not in writer.tokenizer.decode(prompt.ids[length:start])


@pytest.mark.quick("chat template")
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_facts_fill_what_is_read_and_prompts_differ(writer, probe):
    first, second = writer.prompts(probe, 772, 2)
    assert first.ids != second.ids
    assert first == writer.prompt(probe, 772, 0)
    # Of the question no more than the length of a fact is read with the facts.
    asked = writer.tokenizer.decode(first.ids[772 - 45 :])
    assert any(words in asked for words in ("What are", "values of", "def main"))


def test_turns_are_asked_about_in_a_later_one(writer):
    turns = next(probe for probe in PROBES if probe.name == "turns")
    prompt = writer.prompt(turns, 772, 0)
    text = writer.tokenizer.decode(prompt.ids)
    first, second, third = (text.index(said) for said in ("Remember this text", "Remember this one", "What are the"))
    stated = [text.index(writer.tokenizer.decode(prompt.ids[a:b]).strip()) for a, b in prompt.answers]
    assert any(first < place < second for place in stated)
    assert any(second < place < third for place in stated)
    assert text.count("[assistant]") == text.count("[user]") == (3 if writer.is_templated else 0)


def test_a_template_that_drops_what_is_said_is_not_used(writer):
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    for template in ("{{ messages[0]['content'] }}", "{{ raise_exception('roles') }}"):
        tokenizer.chat_template = template
        assert not Writer(tokenizer, [5, 6, 7], seed=0).is_templated


def test_facts_take_whole_pages_and_leave_room_for_the_question():
    assert probe_tokens(1024) == 6 * 128
    assert probe_tokens(512) == 256
    assert probe_tokens(300) == 0


@pytest.mark.parametrize("scheme", [None, "kivi"])
def test_an_answer_is_right_exactly_if_greedy_generation_gives_it(scheme):
    model = tiny_model("llama", max_position_embeddings=512)
    decoder = Decoder.plain(model)
    if scheme is not None:
        model.set_attn_implementation("kvconvert")
        decoder = Decoder(model, lambda: KVCache(model.config, KVScheme.preset(scheme)))
    context = torch.randint(4096, (2, 150), generator=torch.Generator().manual_seed(0))
    given = generate_greedily(decoder, context[:, :132], context[:, 132:], 5, chunk=128)
    prompts = []
    for row, answer in zip(context.tolist(), given.tolist(), strict=True):
        prompts.append(ProbePrompt(row + answer, 132, ((150, 153), (153, 155))))
        wrong = [*answer[:4], (answer[4] + 1) % 4096]
        prompts.append(ProbePrompt(row + wrong + [7], 132, ((150, 153), (153, 155))))
    for batch in (1, 3):
        assert ask(decoder, prompts, batch) == [[True, True], [True, False]] * 2


class Knowing:
    """A model that has seen some prompts and answers a share of what they ask for.

    Args:
        prompts: that it knows word for word.
        share: of the answers of each that it gives.
    """

    device = torch.device("cpu")

    def __init__(self, prompts, share):
        self.prompts, self.share, self.passes = prompts, share, []

    def __call__(self, input_ids, **kwargs):
        past_key_values = kwargs[CACHE]
        past_key_values += input_ids[0].tolist()
        self.passes.append(input_ids.shape[1])
        prompt = next(p for p in self.prompts if p.ids[: len(past_key_values)] == past_key_values)
        following = [*prompt.ids[1:], 0]
        for start, _ in prompt.answers[round(self.share * len(prompt.answers)) :]:
            following[start - 1] += 1
        place = len(past_key_values)
        logits = torch.nn.functional.one_hot(torch.tensor(following[place - input_ids.shape[1] : place]), 5000)
        return types.SimpleNamespace(logits=logits[None].float())

    def decoder(self):
        return Decoder(self, list)


def test_prompts_are_read_page_by_page_and_their_answers_in_one_pass(writer):
    prompts = writer.prompts(JSON, 260, 2)
    model = Knowing(prompts, 0.5)
    assert ask(model.decoder(), prompts) == [[True] * 3 + [False] * 3] * 2
    assert model.passes == [n for prompt in prompts for n in (128, 128, 4, len(prompt.ids) - 260)]


def test_a_probe_measures_both_and_asks_no_bundle_what_its_source_cannot_do(writer):
    prompts = {"json": writer.prompts(JSON, 260, 8)}
    source, bundle, silent = (Knowing(prompts["json"], share) for share in (1.0, 0.5, 0.0))
    found = measure_probes(source.decoder(), bundle.decoder(), prompts, seed=0)["json"]
    assert (found.source, found.bundle, found.kept, found.loss_interval) == (1.0, 0.5, 0.5, (0.5, 0.5))
    assert (found.prompts, found.answers, found.tokens) == (8, 8 * ASKED, 260)
    bundle.passes.clear()
    found = measure_probes(silent.decoder(), bundle.decoder(), prompts, seed=0)["json"]
    assert (found.source, found.bundle, found.kept, found.prompts) == (0.0, None, None, PILOT)
    assert not bundle.passes


def result(ability: str, source: float, bundle: float, prompts: int = 10) -> ProbeResult:
    def right(share: float) -> list[list[bool]]:
        return [[i < round(10 * share) for i in range(10)] for _ in range(prompts)]

    return ProbeResult.of(ability, right(source), right(bundle), 772, seed=0)


def test_the_verdict_says_what_is_kept_what_is_lost_and_what_is_not_judged():
    probes = {
        "a": result("finding needles", 1.0, 0.9),
        "b": result("following chains", 0.5, 0.4),
        "c": result("reading code", 0.1, 0.1),
        "d": result("listing keys", 1.0, 0.5, prompts=7),
    }
    found = abilities(probes, RetrievalResult(0.5, 0.45, 60, {}, {}))
    assert verdict(found, (20.0, 21.0), 512) == (
        "Fit for continuing text, retrieving a number from prose and finding needles; not fit for following chains "
        "(keeps 80%); not judged: reading code and listing keys."
    )
    # Two of 60 prompts less are no evidence, and are not called fit.
    unclear = abilities({}, RetrievalResult(0.5, 0.4, 60, {}, {}, loss_interval=(-0.02, 0.22)))
    assert verdict(unclear, None, 0) == "Unclear with so few prompts: retrieving a number from prose (keeps 80%)."
    assert losses(found) == ["following chains (40% right, the source 50%)"]
    # A ninth more perplexity is a tenth less probability.
    assert verdict([], (20.0, 22.3), 512) == "Not fit for continuing text (keeps 89%)."
    assert verdict([], (20.0, 20.0), 511) == "Not judged: continuing text."
    # A source that guesses worse than at random, as a model of drawings does on novels, is no measure of a bundle.
    assert verdict([], (2e9, 2e9), 512, 436) == "Not judged: continuing text."
    assert verdict([], (20.0, 2e9), 512, 436) == "Not fit for continuing text (keeps 0%)."
    assert verdict([], None, 0) is None


def test_retrieval_that_was_not_measured_is_not_named():
    for retrieval in (None, RetrievalResult(None, None, 0, {}, {})):
        assert abilities({}, retrieval) == []
    assert abilities({}, RetrievalResult(0.9, 0.5, 7, {}, {}))[0].kept is None


def test_a_bundle_may_do_better_than_its_source_and_one_prompt_has_no_interval():
    assert result("x", 0.5, 0.7).kept == pytest.approx(1.4)
    assert result("x", 0.5, 0.4, prompts=1).loss_interval is None


def test_no_bar_is_shown_for_no_prompts(capsys):
    assert ask(None, [], 1, "json, source") == []
    assert capsys.readouterr().err == ""
