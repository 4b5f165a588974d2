import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvconvert.runtime.engine.request import TextStream

REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "reference-lm"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REFERENCE)


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def pieces(stream, ids):
    """The text of each token until a stop string is found, and then what was held back."""
    shown = []
    for token in ids:
        piece, stopped = stream.push(token)
        shown.append(piece)
        if stopped:
            return shown
    return [*shown, stream.finish()]


@pytest.mark.parametrize("text", ["It was a dark night.", "naïve café — 東京 🌍🚀 “so”", "  spaces\n\n\tand tabs  "])
def test_pieces_add_up_to_the_text_and_show_no_incomplete_character(tokenizer, text):
    prompt = tokenizer("Once upon a time").input_ids
    ids = tokenizer(text, add_special_tokens=False).input_ids
    shown = pieces(TextStream(tokenizer, prompt), ids)
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=True)
    assert "".join(shown) == whole[len(tokenizer.decode(prompt, skip_special_tokens=True)) :]
    assert not any("\ufffd" in piece for piece in shown)
    assert sum(map(bool, shown)) > 3


def bytes_alone():
    """A tokenizer of Llama's kind whose tokens are bytes, of which decoding shows none where one is out of place."""
    made = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("prompt", ["🌍🚀", "東京", "éa東", "a🌍b", "\ufffd🌍"])
def test_a_prompt_of_bytes_spoils_no_character_of_the_answer(prompt):
    answer = "🌍 東京é."
    shown = pieces(TextStream(bytes_alone(), [*prompt.encode()]), [*answer.encode()])
    assert "".join(shown) == answer


def test_no_letter_is_lost_where_a_tokenizer_takes_spaces_out_of_what_it_decodes():
    cleans = {"clean_up_tokenization_spaces": True}
    cleans["clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"] = True
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE, **cleans)
    text = " I do n't ; they 're . And I 'm ? No !"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) != text
    assert "".join(pieces(TextStream(tokenizer, ids[:1]), ids[1:])) == text[len(tokenizer.decode(ids[:1])) :]


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer):
    ids = tokenizer("🌍", add_special_tokens=False).input_ids
    assert len(ids) > 1
    stream = TextStream(tokenizer, [1])
    assert stream.push(ids[0]) == ("", False)
    assert stream.finish() == tokenizer.decode(ids[:1])


@pytest.mark.parametrize("seed", range(200))
def test_text_ends_before_the_earliest_stop_string_and_holds_back_no_more_than_needed(seed):
    dice = random.Random(seed)
    text = "".join(dice.choices("ab", k=30))
    stops = ["".join(dice.choices("ab", k=dice.randint(2, 7))) for _ in range(dice.randint(1, 3))]
    stream = TextStream(Letters(), [ord("a")] * 9, stops)
    shown = ""
    for count, letter in enumerate(text, 1):
        piece, stopped = stream.push(ord(letter))
        shown += piece
        found = [place for stop in stops if (place := text[:count].find(stop)) >= 0]
        assert stopped == bool(found)
        if stopped:
            assert shown == text[: min(found)]
            return
        held = text[len(shown) : count]
        assert shown + held == text[:count]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert shown + stream.finish() == text


def test_without_stop_strings_nothing_is_held_back():
    stream = TextStream(Letters(), [])
    assert [stream.push(ord(letter)) for letter in "abc"] == [("a", False), ("b", False), ("c", False)]
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", ["special", "incomplete"])
def test_tokens_that_give_no_text_are_not_decoded_again_and_again(tokenizer, kind):
    decoded = []

    class Counting:
        def decode(self, ids, skip_special_tokens):
            decoded.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    word = tokenizer(" word").input_ids
    silent = tokenizer("\u6771").input_ids[:1] if kind == "incomplete" else [tokenizer.eos_token_id]
    shown = pieces(TextStream(Counting(), tokenizer("Once").input_ids), [*word, *silent * 500, *word])
    assert max(decoded) < 50
    assert shown[0] == " word"
    assert "".join(shown).endswith(" word")
    assert "".join(shown).count("word") == 2


def test_a_token_is_decoded_about_once(tokenizer):
    decoded = []

    class Counting:
        def decode(self, ids, skip_special_tokens):
            decoded.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    ids = tokenizer(" once upon a time" * 50).input_ids
    shown = pieces(TextStream(Counting(), tokenizer("Once").input_ids), ids)
    assert "".join(shown) == " once upon a time" * 50
    assert len(decoded) < 1.3 * len(ids)
    assert max(decoded) < 20
