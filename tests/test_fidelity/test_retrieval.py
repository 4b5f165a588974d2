"""Retrieval drills ask what they say they ask, and count exact answers alone."""

import pytest
import torch
from tiny.checkpoints import REFERENCE
from transformers import AutoTokenizer

from kvconvert.data.sources import EVALUATION
from kvconvert.data.text import load_token_samples
from kvconvert.errors import UsageError
from kvconvert.fidelity.retrieval import (
    CITIES,
    NAMES,
    DrillBook,
    DrillCounts,
    NumberBook,
    agreement,
    has_plain_template,
    retrieval,
    retrieval_drills,
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE)


@pytest.fixture(scope="module")
def book(tokenizer):
    prose = load_token_samples(EVALUATION, tokenizer, 2, 1024, 0).ids.flatten().tolist()
    return DrillBook(tokenizer, prose, seed=0)


def test_agreement_counts_tokens_before_the_first_difference():
    first = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4]])
    second = torch.tensor([[1, 2, 3, 4], [1, 2, 7, 4], [1, 2, 3, 4]])
    assert agreement(first, second).tolist() == [4, 2, 0]


def test_prompts_fill_whole_pages_and_state_the_code_at_its_depth(book, tokenizer):
    drill = book.code(512, 0.3)
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


def test_retrieval_counts_exact_answers_by_length_and_depth(book, tokenizer):
    def perfect(drills, new_tokens):
        return [f" {code_in(drill, tokenizer)}." for drill in drills]

    def shallow(drills, new_tokens):
        # Forgets what was said early, gets one digit wrong or says too many: none of these counts.
        wrong = lambda code: [f" {code[:4]}x", f" {code}1", "", f" about {code}"][int(code) % 4]  # noqa: E731
        return [
            f" {drill.expected}. And" if drill.depth > 0.4 else wrong(code_in(drill, tokenizer)) for drill in drills
        ]

    result = retrieval(perfect, shallow, retrieval_drills(book, 600, 4))
    assert list(result.by_length) == ["128", "256", "512"]
    assert (result.source, result.bundle) == (1.0, pytest.approx(3 / 5))
    assert result.prompts == 60
    assert {depth: pair[1] for depth, pair in result.by_depth.items()} == {
        "0.1": 0.0, "0.3": 0.0, "0.5": 1.0, "0.7": 1.0, "0.9": 1.0
    }  # fmt: skip
    assert retrieval(perfect, perfect, retrieval_drills(book, 150, 4)).source is None


@pytest.mark.parametrize(
    ("context", "lengths"),
    [
        (100, []),
        (256, [128]),
        (512, [128, 256, 384]),
        (1024, [256, 512, 896]),
        (1025, [256, 512, 896]),
        (2000, [384, 896, 1920]),
        (9999, [2048]),
    ],
)
def test_codes_lie_as_far_back_as_the_context_asked_for_or_the_text_allows(book, context, lengths):
    drills = retrieval_drills(book, context, 1)
    assert sorted({len(drill.context) for drill in drills}) == lengths
    assert len(drills) == 5 * len(lengths)


def test_counts_say_how_much_is_drilled_and_none_is_left_out(book, tokenizer):
    def silent(drills, new_tokens):
        return [""] * len(drills)

    few = DrillCounts(retrieval_trials=1)
    assert retrieval(silent, silent, retrieval_drills(book, 600, few.retrieval_trials)).prompts == 15
    with pytest.raises(UsageError, match="`probes` is 0"):
        DrillCounts(probes=0)


class ChatTokenizer:
    """The reference tokenizer with a chat template."""

    def __init__(self, tokenizer, template):
        self.plain, self.special_tokens_map = tokenizer, {}
        self.chat_template = template and template.replace("CONTENT", "{{ messages[0].content }}")

    def __call__(self, *args, **kwargs):
        return self.plain(*args, **kwargs)


def test_numbers_are_hidden_in_prose_and_asked_for_through_the_chat_template(tokenizer):
    chat = ChatTokenizer(tokenizer, "[{user}] CONTENT [{assistant}]{{ '\\n' }}")
    prose = load_token_samples(EVALUATION, tokenizer, 1, 1024, 0).ids.flatten().tolist()
    book = NumberBook(chat, prose, seed=0)
    drills = book.drills(400, 10)
    assert {len(drill.context) for drill in drills} == {400}
    assert len({len(drill.cue) for drill in drills}) == 1, "questions of one length are asked in one batch"
    assert [drill.depth for drill in drills] == [0.1, 0.3, 0.5, 0.7, 0.9] * 2
    for drill in drills:
        context, cue = tokenizer.decode(drill.context), tokenizer.decode(drill.cue)
        city = next(city for city in CITIES if city in cue)
        stated = f"The special magic number for {city} is {drill.expected}."
        assert context.startswith("[{user}] Read this text.")
        assert context.count("magic number") == 1
        assert abs(context.index(stated) / len(context) - drill.depth) < 0.12
        assert cue.endswith(f"[{{assistant}}]\nThe special magic number for {city} is")
        assert f"What is the special magic number for {city}?" in cue
    with pytest.raises(UsageError, match="no room for a number"):
        book.drill(10, 0.5)


def test_a_template_that_changes_the_message_is_not_used(tokenizer):
    assert has_plain_template(ChatTokenizer(tokenizer, "CONTENT"))
    assert not has_plain_template(ChatTokenizer(tokenizer, "nothing of it"))
    assert not has_plain_template(ChatTokenizer(tokenizer, None))


def test_fewer_tokens_take_fewer_drills():
    assert DrillCounts.for_tokens(10**6) == DrillCounts.for_tokens(8192) == DrillCounts()
    assert DrillCounts.for_tokens(1024) == DrillCounts(1, 2, 2, 2, 16)
    assert DrillCounts.for_tokens(1) == DrillCounts(1, 1, 1, 1, 16)
