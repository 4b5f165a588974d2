"""What the length of a text says of its tokens is never more than there are."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvconvert.models.token_bytes import _byte_letters, token_bytes

REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "reference-lm"
LETTERS = _byte_letters()


def bpe(letters, merges=(), **options):
    tokens = [*letters, *("".join(pair) for pair in merges)]
    return BPE({token: id for id, token in enumerate(tokens)}, list(merges), **options)


def wrapped(model, normalizer=None, pre_tokenizer=None, added=()):
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
FALLBACK = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
BOUNDED = {
    "reference": lambda: AutoTokenizer.from_pretrained(REFERENCE),
    "bytes": lambda: wrapped(bpe(LETTERS, [("a", "b"), ("Ġ", "Ġ"), ("ab", "ĠĠ")]), None, BYTES),
    "composed": lambda: wrapped(bpe(LETTERS, [("a", "b")]), normalizers.NFC(), BYTES),
    "without some bytes": lambda: wrapped(bpe([x for x in LETTERS if x not in "aé"]), None, BYTES),
    "fallback": lambda: wrapped(
        bpe(FALLBACK, [("▁", "a")], byte_fallback=True), normalizers.Replace(" ", "▁"), added=["<a longer one>"]
    ),
}


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_text_has_at_least_as_many_tokens_as_its_bytes_say(kind):
    tokenizer = BOUNDED[kind]()
    bound = token_bytes(tokenizer)
    assert bound is not None

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from(["a", "b", " ", "é", "<a longer one>", "\u1112\u1161\u11ab"]) | st.text()))
    @example(["\u1fef" * 40])
    @example(["ab  " * 40])
    def check(parts):
        text = "".join(parts)
        assert bound.least_tokens(text) <= len(tokenizer(text, add_special_tokens=False).input_ids)

    check()
    assert bound.least_tokens("b" * 10_000) >= 10_000 // 60  # and says something


UNBOUNDED = {
    "words": lambda: wrapped(WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"), None, pre_tokenizers.Whitespace()),
    "stripped": lambda: wrapped(bpe(LETTERS), normalizers.Strip(), BYTES),
    "compatible": lambda: wrapped(bpe(LETTERS), normalizers.NFKC(), BYTES),
    "no bytes": lambda: wrapped(bpe(["a", "b"]), None, pre_tokenizers.Metaspace()),
    "removed": lambda: wrapped(
        bpe(LETTERS), None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])
    ),
    "greedy": lambda: wrapped(bpe(LETTERS), None, BYTES, [AddedToken("<x>", lstrip=True)]),
    "shortened": lambda: wrapped(bpe(LETTERS), normalizers.Replace("ab", ""), BYTES),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_may_drop_any_amount_of_text_has_no_bound(kind):
    assert token_bytes(UNBOUNDED[kind]()) is None
    assert token_bytes(object()) is None
