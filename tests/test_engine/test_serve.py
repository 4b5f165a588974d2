"""`kvconvert serve` through the `openai` package: the same tokens as `generate`, and what else clients rely on."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from serving import NAME, serving

from kvconvert import load
from kvconvert.bundle.generation import read_generation
from kvconvert.runtime import Sampling
from kvconvert.runtime.engine.sampling import recommended

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = ["Once upon a time", "It was a dark night, and", "The miller", "He said"]
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is the miller?"}]


@pytest.fixture(scope="module")
def loaded(converted):
    model, tokenizer = load(converted / "bundle", dtype=torch.float32)
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


@pytest.fixture(scope="module")
def here(loaded):
    model, tokenizer = loaded
    with serving(model, tokenizer, max_batch=3) as here:
        yield here


@pytest.fixture(scope="module")
def client(here):
    with here.client() as client:
        yield client


def generated(loaded, ids, count):
    """Text of the greedy continuation that `generate` gives alone."""
    model, tokenizer = loaded
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)[0].tolist()
    before = tokenizer.decode(ids, skip_special_tokens=True)
    return tokenizer.decode(tokens, skip_special_tokens=True)[len(before) :]


def test_many_clients_get_the_text_that_generate_gives_alone(loaded, client):
    tokenizer = loaded[1]

    def streamed(prompt):
        stream = client.completions.create(model=NAME, prompt=prompt, max_tokens=20, temperature=0, stream=True)
        pieces = [piece.choices[0] for piece in stream]
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert len(pieces) > 2  # a busy machine sends several tokens at once
        return "".join(piece.text for piece in pieces)

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(streamed, PROMPTS * 2))
    assert texts == [generated(loaded, tokenizer(prompt).input_ids, 20) for prompt in PROMPTS] * 2


def test_a_list_of_prompts_has_a_choice_for_each_and_one_usage(loaded, client):
    ids = [loaded[1](prompt).input_ids for prompt in PROMPTS]
    answer = client.completions.create(model=NAME, prompt=ids, max_tokens=7, temperature=0)
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [generated(loaded, prompt, 7) for prompt in ids]
    read = sum(map(len, ids))
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": read,
        "completion_tokens": 28,
        "total_tokens": read + 28,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_chat_answers_in_the_models_template_whole_and_in_pieces(loaded, client):
    ids = loaded[1].apply_chat_template(TURNS, add_generation_prompt=True, return_dict=True)["input_ids"]
    asked = {"model": NAME, "messages": TURNS, "max_completion_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(**asked)
    expected = generated(loaded, ids, 12)
    assert (answer.object, answer.model) == ("chat.completion", NAME)
    assert answer.id.startswith("chatcmpl-")
    assert answer.id == answer._request_id
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", expected)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 12)

    usage = {"include_usage": True}
    *pieces, last = client.chat.completions.create(**asked, stream=True, stream_options=usage)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    assert [piece.usage for piece in pieces] == [None] * len(pieces)
    assert (last.choices, last.usage) == ([], answer.usage)
    usage |= {"continuous_usage_stats": True}
    opening, *pieces, last = client.chat.completions.create(**asked, stream=True, stream_options=usage)
    counts = [piece.usage.completion_tokens for piece in pieces]
    assert (opening.usage, counts) == (None, sorted(counts))
    assert 1 <= counts[0] <= counts[-1] == last.usage.completion_tokens
    assert {piece.usage.prompt_tokens for piece in pieces} == {len(ids)}


def test_a_conversation_goes_on_from_the_answer_as_the_client_has_it(loaded, client):
    first = client.chat.completions.create(model=NAME, messages=TURNS, max_tokens=5, temperature=0).choices[0].message
    parts = [{"type": "text", "text": "Why?"}, {"type": "text", "text": "Say."}]
    turns = [*TURNS, first, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=NAME, messages=turns, max_tokens=5, temperature=0)
    plain = [*TURNS, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Why?\nSay."}]
    ids = loaded[1].apply_chat_template(plain, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.content == generated(loaded, ids, 5)
    developer = [{"role": "developer", "content": "Be brief."}, TURNS[1]]
    same = client.chat.completions.create(model=NAME, messages=developer, max_tokens=5, temperature=0)
    assert same.choices[0].message.content == first.content


def test_a_seed_draws_the_same_choices_again_and_each_choice_its_own(client):
    asked = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 6, "temperature": 1.5, "extra_body": {"top_k": 500}}

    def texts(**more):
        return [choice.text for choice in client.completions.create(**asked, **more).choices]

    three = texts(seed=7, n=3)
    assert len(set(three)) == 3
    assert texts(seed=7, n=3) == three
    assert [*texts(seed=7), *texts(seed=8), *texts(seed=9)] == three
    # After the largest seed comes the smallest.
    assert texts(seed=2**63 - 1, n=2) == [*texts(seed=2**63 - 1), *texts(seed=-(2**63))]
    assert texts() != texts()
    asked["extra_body"] = {"top_k": -1}
    every = texts(seed=7, n=3)
    asked["extra_body"] = {"top_k": 0}
    assert texts(seed=7, n=3) == every
    asked["extra_body"] = {"top_k": 500}
    pieces = ["", "", ""]
    for piece in client.completions.create(**asked, seed=7, n=3, stream=True):
        pieces[piece.choices[0].index] += piece.choices[0].text
    assert pieces == three


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, stream):
    asked = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 1.5, "seed": 3}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[len(whole) // 2 :][:4]
    answer = client.completions.create(**asked, stop=[stop, "\u2603"], stream=stream)
    choices = [piece.choices[0] for piece in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"
    assert client.completions.create(**asked, stop=stop).choices[0].text == whole[: whole.index(stop)]


def test_what_is_not_stated_is_as_openai_documents_it_or_as_the_model_allows(client):
    answer = client.completions.create(model=NAME, prompt=PROMPTS[0], extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16
    # A chat has what is left of the model's 512 positions.
    long = [TURNS[0], {"role": "user", "content": "The miller walked home, and the old house stood. " * 28}]
    chat = client.chat.completions.create(model=NAME, messages=long, extra_body={"ignore_eos": True})
    assert chat.usage.prompt_tokens > 300
    assert chat.usage.total_tokens == 512
    assert chat.choices[0].finish_reason == "length"


def test_the_model_is_listed_and_another_one_is_not_found(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "kvconvert"
    for ask in (
        lambda: client.models.retrieve("other/model"),
        lambda: client.completions.create(model="other/model", prompt="x"),
    ):
        with pytest.raises(openai.NotFoundError, match="no model 'other/model' here; the one served is 'tiny'") as told:
            ask()
        assert told.value.code == "model_not_found"


def test_errors_are_those_of_the_package(client):
    with pytest.raises(openai.BadRequestError, match="room for 507") as told:
        client.completions.create(model=NAME, prompt=PROMPTS[0], max_tokens=4000)
    assert (told.value.code, told.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError, match="prompt has 600 tokens, which is too long") as told:
        client.completions.create(model=NAME, prompt=[1] * 600)
    assert (told.value.code, told.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="writes no calls of tools"):
        client.chat.completions.create(
            model=NAME, messages=TURNS, tools=[{"type": "function", "function": {"name": "x"}}]
        )
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="an image as data: is not served"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": parts}])


def test_a_conversation_that_the_template_refuses_is_one_sentence(loaded, here, client, monkeypatch):
    monkeypatch.setattr(loaded[1], "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(openai.BadRequestError, match=r"template refuses the conversation .*roles must alternate"):
        client.chat.completions.create(model=NAME, messages=TURNS)
    monkeypatch.setattr(loaded[1], "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"):
        client.chat.completions.create(model=NAME, messages=TURNS)
    here.idle()


def test_metrics_count_what_was_served(here, client):
    before = here.metrics()
    client.completions.create(model=NAME, prompt=[1, 2, 3], max_tokens=9, extra_body={"ignore_eos": True})
    after = here.metrics()
    change = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert change['kvconvert_requests_total{outcome="finished"}'] == 1
    assert change["kvconvert_prompt_tokens_total"] == 3
    assert change["kvconvert_generated_tokens_total"] == 9
    assert change['kvconvert_http_responses_total{path="/v1/completions",status="200"}'] == 1
    assert change['kvconvert_first_token_seconds_bucket{le="+Inf"}'] == change["kvconvert_first_token_seconds_count"]
    assert change["kvconvert_first_token_seconds_count"] == change["kvconvert_request_seconds_count"] == 1
    assert change["kvconvert_token_seconds_count"] == 8
    assert after["kvconvert_requests_running"] == after["kvconvert_requests_waiting"] == 0


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, Sampling(temperature=1.0)),
        ({"do_sample": False}, Sampling(temperature=0.0)),
        ({"do_sample": True, "temperature": 0}, Sampling(temperature=0.0)),
        ({"do_sample": True, "top_k": -1, "top_p": 1}, Sampling(temperature=1.0)),
        ({"repetition_penalty": 2}, Sampling(temperature=1.0, settings={"repetition_penalty": 2.0})),
        ({"temperature": 0.6, "top_k": 20}, Sampling(temperature=1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, Sampling(temperature=0.6, top_k=20)),
        ({"do_sample": True, "top_p": 0.8}, Sampling(temperature=1.0, top_p=0.8)),
    ],
)
def test_a_model_that_asks_for_sampling_is_sampled_as_it_asks(stated, expected):
    assert recommended(read_generation(stated).values, unstated=1.0) == expected


def test_a_prompt_that_begins_as_an_earlier_one_says_what_it_did_not_read(loaded, monkeypatch):
    monkeypatch.setattr(loaded[1], "chat_template", None)  # which takes a while to compile
    with serving(*loaded, prompt_chunk=128, max_batch=2) as here:
        prompt, before = list(range(1, 300)), here.metrics()
        asked = {"model": NAME, "max_tokens": 5, "temperature": 0}
        texts, cached = [], []
        for ids in (prompt, [*prompt[:260], 7, 8, 9], prompt):
            answer = here.client().completions.create(prompt=ids, **asked)
            texts.append(answer.choices[0].text)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert cached == [0, 256, 256]
        assert texts[0] == texts[2]
        after = here.metrics()
        assert after["kvconvert_cached_tokens_total"] - before["kvconvert_cached_tokens_total"] == 512
        assert after["kvconvert_prefix_pages"] == 2
        here.idle()
