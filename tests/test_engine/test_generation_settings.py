"""generation_config.json means the same wherever a bundle generates: each of its fields is applied, translated, or
named.
"""

import json
import logging
import shutil

import pytest
import torch
from tiny.bundle import edit_json, reseal
from tiny.llama import write_tiny_bundle
from transformers import GenerationConfig

from kvconvert import KvconvertError, load
from kvconvert.bundle.generation import NGRAMS, PROCESSED, read_generation, stop_tokens
from kvconvert.console import Console
from kvconvert.errors import BundleError, UsageError
from kvconvert.runtime import Engine, Sampling
from kvconvert.runtime.engine.sampling import logits_processors

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 9, 10]
NEW = 12


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def stating(bundle, tmp_path):
    """A copy of the bundle whose generation_config.json says this and no more."""

    def copy(text=None, **fields):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        made = tmp_path / "copy"
        shutil.copytree(bundle, made)
        (made / "generation_config.json").write_text(json.dumps(fields) if text is None else text)
        reseal(made)
        return made

    return copy


def test_an_answer_without_a_stated_length_has_that_of_the_settings_as_far_as_there_is_room(stating):
    for said, expected in ((5, 5), (100_000, None), (None, 256)):
        model, tokenizer = load(stating(**({} if said is None else {"max_new_tokens": said})), dtype=torch.float32)
        engine = Engine(model, tokenizer)
        room = engine.room(len(PROMPT))
        request = engine.add(PROMPT)
        assert request.max_new_tokens == (room if expected is None else min(expected, room))


@pytest.mark.parametrize("name", ["max_length", "max_new_tokens"])
def test_generate_takes_no_more_tokens_from_the_settings_than_the_model_has_positions(name, stating):
    model, _ = load(stating(**{name: 10**9}), dtype=torch.float32)
    assert getattr(model.generation_config, name) == model.config.max_position_embeddings


def answers(model, tokenizer, **options):
    """The tokens of `generate`, and those of an Engine's request that says nothing."""
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **options)
    engine = Engine(model, tokenizer, max_batch=2)
    request = engine.add(PROMPT, max_new_tokens=NEW)
    engine.run()
    return output[0, len(PROMPT) :].tolist(), request.tokens


@pytest.fixture(scope="module")
def plain(bundle):
    model, tokenizer = load(bundle, dtype=torch.float32)
    asked, found = answers(model, tokenizer)
    assert asked == found
    return found


FIRST = 3  # place of a token of the plain answer that settings take away


@pytest.mark.quick(
    "repetition_penalty-no", "sequence_bias", "min_new", "forced_bos", "watermarking", "temperature-top_k"
)
@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 2},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 0.5, "encoder_no_repeat_ngram_size": 2},
        {"bad_words_ids": [["first"]]},
        {"suppress_tokens": ["first"]},
        {"begin_suppress_tokens": ["zeroth"]},
        {"sequence_bias": [[["first"], -50.0]]},
        {"min_new_tokens": 9, "eos_token_id": ["first"]},
        {"min_length": 19, "eos_token_id": ["first"]},
        {"forced_bos_token_id": 9, "forced_eos_token_id": 77},
        {"exponential_decay_length_penalty": [2, 40.0], "eos_token_id": 33},
        {"watermarking_config": {"bias": 40.0, "seeding_scheme": "lefthash"}},
        {"watermarking_config": {}},
        {"do_sample": True, "temperature": 0.0, "repetition_penalty": 2.0},
        {"do_sample": True, "min_p": 1.0, "suppress_tokens": ["first"]},
        {"do_sample": True, "temperature": 0.7, "top_k": 1, "top_p": 0.5, "repetition_penalty": 3.0},
        {"renormalize_logits": True, "remove_invalid_values": True, "suppress_tokens": ["first"]},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_request_is_answered_as_generate_answers(fields, stating, plain):
    text = json.dumps(fields).replace('"first"', str(plain[FIRST])).replace('"zeroth"', str(plain[0]))
    asked, found = answers(*load(stating(text), dtype=torch.float32))
    assert found == asked
    assert found != plain


@pytest.mark.parametrize(
    ("fields", "room"),
    [({"max_length": 14}, 4), ({"max_new_tokens": 3, "max_length": 99}, 3), ({"max_length": 10}, 0)],
    ids=str,
)
def test_the_file_says_how_long_a_text_becomes_where_nobody_else_does(fields, room, stating, caplog):
    model, tokenizer = load(stating(**fields, eos_token_id=None), dtype=torch.float32)
    engine, prompt = Engine(model, tokenizer), PROMPT[:10]
    if not room:
        with pytest.raises(UsageError, match="allows no new token after a prompt of 10 tokens"):
            engine.add(prompt)
        return
    assert engine.add(prompt).max_new_tokens == room
    assert model.generate(torch.tensor([prompt])).shape[1] == 10 + room
    for_vllm = read_generation(fields).for_vllm()[1] or ""
    assert ("max_length = 14" in for_vllm) == ("max_new_tokens" not in fields)


def test_a_length_of_the_file_means_nothing_beside_a_stated_number_of_new_tokens(stating, plain):
    asked, found = answers(*load(stating(max_length=0), dtype=torch.float32))
    assert asked == found == plain


def test_settings_of_one_request_leave_the_others_alone(bundle, plain):
    model, tokenizer = load(bundle, dtype=torch.float32)
    engine = Engine(model, tokenizer, max_batch=3)
    settings = {"repetition_penalty": 3.0}
    hot = Sampling(temperature=0.8, top_k=9, seed=4)
    asked = [(PROMPT, Sampling(settings=settings)), (PROMPT, Sampling()), (PROMPT[:4], hot), (PROMPT, Sampling())]
    together = [engine.add(prompt, max_new_tokens=NEW, sampling=sampling) for prompt, sampling in asked]
    engine.run()
    assert together[1].tokens == together[3].tokens == plain
    assert together[0].tokens != plain
    for request, (prompt, sampling) in zip(together, asked, strict=True):
        alone = Engine(model, tokenizer, max_batch=1)
        other = alone.add(prompt, max_new_tokens=NEW, sampling=sampling)
        alone.run()
        assert request.tokens == other.tokens


def test_what_is_drawn_with_settings_has_their_probabilities(bundle):
    model, tokenizer = load(bundle, dtype=torch.float32)
    engine = Engine(model, tokenizer, max_batch=32)
    logits = model(torch.tensor([PROMPT])).logits[0, -1].float()
    banned = logits.topk(5).indices.tolist()
    settings = {"suppress_tokens": banned, "min_p": 0.5}
    requests = [
        engine.add(PROMPT, max_new_tokens=1, sampling=Sampling(temperature=0.5, seed=seed, settings=settings))
        for seed in range(200)
    ]
    engine.run()
    logits[banned] = -torch.inf
    chances = (logits / 0.5).softmax(-1)
    chances[chances < 0.5 * chances.max()] = 0
    chances /= chances.sum()
    counts = torch.bincount(torch.tensor([request.tokens[0] for request in requests]), minlength=len(chances))
    assert not counts[chances == 0].any()
    deviation = (counts - 200 * chances).abs() / (200 * chances * (1 - chances)).sqrt().clamp(min=1)
    assert deviation.max() < 5


@pytest.mark.each_value
@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.2}, {"bad_words_ids": [[3]]}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("restriction", [{}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
def test_extreme_temperatures_draw_the_likeliest_or_any_beside_settings(settings, restriction, bundle):
    model, _ = load(bundle, dtype=torch.float32)
    logits = torch.tensor([[9.0, 8.0, 7.0, 20.0, *[-1.0] * (model.config.vocab_size - 4)]])
    likeliest = 0 if "bad_words_ids" in settings else 3

    def drawn(temperature):
        sampling = Sampling(temperature=temperature, settings=settings, **restriction)
        scores = logits_processors(model, sampling, [5], 1, [])(torch.device("cpu"))(
            torch.tensor([[5]]), logits.clone()
        )
        return scores.softmax(-1)[0]

    for cold in (1e-3, 1e-37, 1e-39, 1e-45, 5e-324):
        assert drawn(cold).argmax() == likeliest
        assert drawn(cold).max() == 1
    for hot in (1e38, 3.5e38, 1e300):
        probabilities = drawn(hot)
        assert torch.isclose(probabilities.sum(), torch.tensor(1.0))
        assert (probabilities > 0).sum() == 2 if "top_k" in restriction else (probabilities > 0).sum() > 2


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.2}, {"min_p": 0.1}], ids=str)
def test_beside_settings_the_likeliest_are_chosen_before_a_temperature_makes_them_equal(settings, bundle):
    model, _ = load(bundle, dtype=torch.float32)
    logits = torch.tensor([[1e-7, 3e-7, 2e-7, *[0.0] * (model.config.vocab_size - 3)]])
    sampling = Sampling(temperature=3e38, top_k=2, settings=settings)
    scores = logits_processors(model, sampling, [5], 1, [])(torch.device("cpu"))(torch.tensor([[5]]), logits)
    assert scores[0].isfinite().nonzero().flatten().tolist() == [1, 2]


def test_a_temperature_may_be_an_integer_beside_settings(bundle):
    model, _ = load(bundle, dtype=torch.float32)
    logits = torch.arange(model.config.vocab_size).float()[None]

    def scores(temperature):
        sampling = Sampling(temperature=temperature, settings={"repetition_penalty": 1.2})
        return logits_processors(model, sampling, [5], 1, [])(torch.device("cpu"))(torch.tensor([[5]]), logits)

    assert torch.equal(scores(2), scores(2.0))


@pytest.mark.quick("do_sample-temperature0", "max_length")
@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True, "temperature": 0},
        {"do_sample": True, "temperature": 1e-320},
        {"do_sample": True, "temperature": 1e-38},
        {"do_sample": True, "temperature": 1e39, "top_k": 1},
        {"do_sample": True, "top_p": 0.0},
        {"do_sample": True, "top_k": 1, "top_p": 1.5},
        {"do_sample": False, "top_k": -1, "temperature": 0.6},
        {"temperature": 0.0, "top_k": 0, "top_p": 1},
        {"repetition_penalty": 1, "no_repeat_ngram_size": 0.0, "bad_words_ids": [], "sequence_bias": {}}
        | {"suppress_tokens": [], "stop_strings": [""], "forced_eos_token_id": []}
        | {"pad_token_id": -1, "eos_token_id": -1, "bos_token_id": None},
        {"max_length": 20, "max_new_tokens": 4096, "transformers_version": "4.40.0", "_from_model_config": True}
        | {"output_attentions": True, "return_dict_in_generate": True, "output_scores": True}
        | {"prefill_chunk_size": 0, "prompt_lookup_num_tokens": 0}
        | {"cache_implementation": "hybrid", "compile_config": {"mode": "default"}},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_what_says_greedy_or_nothing_gives_the_plain_answer(fields, stating, plain, caplog, capsys):
    console = Console(stating(**fields), NEW, "cpu", dtype="float32")
    asked, found = answers(console.model, console.tokenizer, return_dict_in_generate=False)
    assert asked == found == plain
    console.complete(console.tokenizer.decode(PROMPT), raw=True)
    assert not [record for record in caplog.records if record.name.startswith("kvconvert")]
    assert "Warning" not in capsys.readouterr().err


@pytest.mark.quick("guidance_scale")
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"num_beams": 4, "length_penalty": 0.5, "early_stopping": True}, "num_beams = 4"),
        ({"num_return_sequences": 3, "do_sample": True, "top_k": 1}, "num_return_sequences = 3"),
        ({"guidance_scale": 1.5}, "guidance_scale = 1.5"),
        ({"token_healing": True}, "token_healing = True"),
        ({"max_time": 100}, "max_time = 100.0"),
    ],
    ids=str,
)
def test_what_requests_do_not_apply_is_named(fields, word, stating, plain, caplog, capsys):
    console = Console(stating(**fields), NEW, "cpu", dtype="float32")
    with caplog.at_level(logging.WARNING, "kvconvert"):
        engine = Engine(console.model, console.tokenizer)
    assert word in caplog.text
    request = engine.add(PROMPT, max_new_tokens=NEW)
    engine.run()
    assert request.tokens == plain
    console.complete(console.tokenizer.decode(PROMPT), raw=True)
    assert word in capsys.readouterr().err or "max_time" in fields


def test_a_tokenizer_that_lacks_what_a_setting_needs_of_it_is_one_sentence(stating):
    console = Console(stating(token_healing=True), NEW, "cpu", dtype="float32")
    console.tokenizer.pad_token = None
    with pytest.raises(UsageError, match=r"generate cannot use its input or settings \(Asking to pad"):
        console.complete("some text", raw=True)


def test_what_makes_the_end_likelier_means_nothing_where_no_token_ends_a_text():
    stated = {"exponential_decay_length_penalty": [2, 1.5]}
    assert read_generation(stated) == read_generation({})
    assert read_generation(stated, [7]).values == {**stated, "eos_token_id": 7}


def test_what_is_no_token_of_the_model_ends_no_text_and_cannot_become_likelier(stating):
    stated = {"exponential_decay_length_penalty": [2, 1.5], "eos_token_id": [10**6]}
    assert read_generation(stated, vocabulary=10**6) == read_generation({})
    model, tokenizer = load(stating(**stated), dtype=torch.float32)
    ends = Engine(model, tokenizer).generation.stops
    assert ends
    assert max(ends) < model.config.vocab_size


@pytest.mark.parametrize("name", NGRAMS)
def test_ngrams_longer_than_any_are_refused_and_not_copied_as_often(name, stating):
    model, _ = load(stating(), dtype=torch.float32)
    with pytest.raises(UsageError, match=rf"{name} = 1,000,000,000; an n-gram has 256 tokens at most"):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=2, **{name: 10**9})
    with pytest.raises(UsageError, match=name):
        Engine(model).add(PROMPT, sampling=Sampling(settings={name: 10**9}))


@pytest.mark.quick("presence_penalty")
@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.5},
        {"chat_format": "chatml"},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "high"},
        {"num_beam_groups": 2, "diversity_penalty": 0.5},
        {"force_words_ids": [[5]]},
    ],
    ids=str,
)
def test_what_nothing_applies_is_named_when_a_bundle_is_loaded(fields, stating, plain, caplog):
    with caplog.at_level(logging.WARNING, "kvconvert"):
        model, tokenizer = load(stating(**fields), dtype=torch.float32)
    name, value = next(iter(fields.items()))
    assert f"{name} = {value!r}" in caplog.text
    asked, found = answers(model, tokenizer)
    assert asked == found == plain


def test_a_setting_that_nothing_applies_is_shown_without_escapes_of_a_terminal():
    assert "\\x1b[31m = 1 of" in read_generation({"\x1b[31m": 1}).warning("kvconvert")


@pytest.mark.parametrize(
    "text",
    [
        *('{"encoder_no_repeat_ngram_size": 1000000000}', '{"no_repeat_ngram_size": 257}'),
        *('{"temperature": "hot"}', '{"temperature": -1}', '{"temperature": NaN}', '{"temperature": true}'),
        *('{"top_k": 2.5}', '{"top_k": -2}', '{"top_k": 1e30, "do_sample": true}', '{"top_p": -0.1}'),
        *('{"do_sample": "yes"}', '{"do_sample": 1}', '{"repetition_penalty": -1}', '{"repetition_penalty": "1.1"}'),
        *('{"eos_token_id": "</s>"}', '{"eos_token_id": [[0]]}', '{"eos_token_id": true}', '{"eos_token_id": {}}'),
        *('{"eos_token_id": 10000000000000000000}', '{"suppress_tokens": [9223372036854775808]}'),
        *(
            '{"temperature": %s}' % ("9" * 400),
            '{"bad_words_ids": [5]}',
            '{"bad_words_ids": [[-5]]}',
            '{"bad_words_ids": [[9999999]]}',
        ),
        *('{"suppress_tokens": ["a"]}', '{"sequence_bias": [[[1], "x"]]}', '{"sequence_bias": 3}'),
        *('{"min_p": 2.0, "do_sample": true}', '{"typical_p": -1.0, "do_sample": true}', '{"min_new_tokens": -4}'),
        *('{"exponential_decay_length_penalty": {"0": 1}}', '{"exponential_decay_length_penalty": [[1], 2.0]}'),
        *('{"exponential_decay_length_penalty": 3}', '{"watermarking_config": {"seeding_scheme": "none"}}'),
        *('{"watermarking_config": 7}', '{"early_stopping": "often", "num_beams": 2}', '{"stop_strings": [1]}'),
        *('{"repetition_penalty": 1e-300}', '{"repetition_penalty": 1e300}'),
        *('{"num_beams": 0}', '{"num_beams": 257}', '{"num_return_sequences": 9999999}'),
        *('{"max_new_tokens": 0.5}', '{"use_cache": "no"}', "[]", "{", '"text"', '{"num_beams": 1e999}'),
    ],
)
def test_a_value_that_nothing_can_apply_is_refused_in_a_sentence(text, stating):
    loaded = []

    def answer():
        loaded.append(Console(stating(text), 2, "cpu"))
        loaded[0].complete("It was", raw=True)

    with pytest.raises(KvconvertError) as error:
        answer()
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)
    for console in loaded:  # where `load` refuses nothing, an Engine does
        with pytest.raises(KvconvertError):
            Engine(console.model, console.tokenizer)


def test_settings_that_nobody_knows_or_can_apply_are_refused(bundle):
    model, tokenizer = load(bundle)
    engine = Engine(model, tokenizer)
    with pytest.raises(UsageError, match="settings bad_words_ids cannot be applied"):
        model.generate(torch.tensor([PROMPT]), bad_words_ids=[[-3]])
    with pytest.raises(UsageError, match="did you mean repetition_penalty"):
        Sampling(settings={"repetition_penality": 1.1})
    with pytest.raises(UsageError, match="bad_words_ids cannot be applied"):
        engine.add(PROMPT, sampling=Sampling(settings={"bad_words_ids": [[-3]]}))
    with pytest.raises(UsageError, match="forced_eos_token_id cannot be applied"):  # to the last token alone
        engine.add(PROMPT, max_new_tokens=9, sampling=Sampling(settings={"forced_eos_token_id": 10**9}))
    with pytest.raises(UsageError, match="exponential_decay_length_penalty cannot be applied"):  # after some tokens
        engine.add(
            PROMPT, max_new_tokens=9, sampling=Sampling(settings={"exponential_decay_length_penalty": [1, 1e300]})
        )


def test_stop_strings_of_the_file_end_requests(stating, bundle, plain):
    text = load(bundle)[1].decode(plain)
    engine = Engine(*load(stating(stop_strings=text[3:6]), dtype=torch.float32))
    request, other = engine.add(PROMPT, max_new_tokens=NEW), engine.add(PROMPT, max_new_tokens=NEW, stop_token_ids=[])
    engine.run()
    assert (request.text, request.finish_reason) == (text[: text.index(text[3:6])], "stop")
    assert other.tokens == plain


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "special", "expected"),
    [
        ({}, [0, 0], None, None, [0]),
        ({"eos_token_id": [4, 5]}, [0, 0], 7, {0, 7}, [4, 5, 0, 7]),
        ({"eos_token_id": 4}, [None, [5, 6]], 4, {5, 6}, [4, 5, 6]),
        # The default of a class of models: a piece of text here, or unknown.
        ({"eos_token_id": 4}, [2, 2], 7, {0, 7}, [4, 7]),
        ({"eos_token_id": 4}, [2], None, None, [4]),
        ({}, [], 7, set(), [7]),
        ({"eos_token_id": -1}, [None, -1], None, None, []),
    ],
)
def test_what_ends_a_text_is_the_union_of_all_that_name_it(generation, config, tokenizer, special, expected):
    assert stop_tokens(generation, config, tokenizer, special) == expected


def test_generate_and_requests_end_at_any_of_these_tokens(stating, bundle, plain, tmp_path):
    for place in ("generation_config.json", "config.json", "tokenizer_config.json"):
        copy = stating()
        added = load(copy)[1].convert_ids_to_tokens(plain[FIRST])
        if place == "tokenizer_config.json":
            edit_json(copy / place, eos_token=added)
        else:
            edit_json(copy / place, eos_token_id=plain[FIRST])
        if place == "config.json":  # where it counts, because the tokenizer takes it for no text
            edit_json(copy / "tokenizer_config.json", extra_special_tokens=[added])
        reseal(copy)
        asked, found = answers(*load(copy, dtype=torch.float32))
        assert asked == found == plain[: plain.index(plain[FIRST]) + 1], place


def test_without_the_file_config_json_says_what_transformers_reads_there(stating, plain):
    fields = {"repetition_penalty": 1.5, "suppress_tokens": plain[:2], "max_length": len(PROMPT) + 5}

    def older(**fields):
        made = stating()
        (made / "generation_config.json").unlink()
        edit_json(made / "config.json", **fields)
        reseal(made)
        return made

    copy = older(**fields)
    model, tokenizer = load(copy, dtype=torch.float32)
    theirs = GenerationConfig.from_pretrained(copy, config_file_name="config.json", _from_model_config=True)
    assert {name: getattr(model.generation_config, name) for name in fields} == fields
    assert model.generation_config.eos_token_id == theirs.eos_token_id
    asked, found = answers(model, tokenizer)
    assert found == asked
    assert not {*found} & {*plain[:2]}
    with pytest.raises(BundleError, match=r"^config\.json says top_k = 'few', where an integer belongs"):
        load(older(top_k="few"))


def test_each_name_of_a_setting_is_one_of_transformers():
    from transformers import GenerationConfig

    known = set(vars(GenerationConfig()))
    assert set(PROCESSED) <= known
    with pytest.raises(BundleError, match="temperature"):
        read_generation({"temperature": []})
    for stops in (["x"] * 65, "x" * 257, ["x", "y" * 257], [1]):
        with pytest.raises(BundleError, match="text of at most 256"):
            read_generation({"stop_strings": stops})
