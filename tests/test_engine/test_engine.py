import math
import random
import threading
import time

import pytest
import torch
from fake_model import END, VOCABULARY, FakeModel, next_logits
from transformers import LogitsProcessor

from kvconvert.errors import NumericError, QueueFullError, UnsupportedModelError, UsageError
from kvconvert.kernels.sampling import sample
from kvconvert.runtime import Engine, Sampling


def alone(prompt, max_new_tokens, sampling, stops=(END,)):
    """What a request gives by itself: one sequence, one token after another."""
    sequence = list(prompt)
    while True:
        new = len(sequence) - len(prompt)
        logits = next_logits(sequence)[None]
        if sampling.greedy:
            token = logits.argmax(-1)
        else:
            columns = [torch.tensor([value]) for value in (sampling.top_k, sampling.seed, new)]
            floats = [torch.tensor([value]) for value in (sampling.temperature, sampling.top_p)]
            token = sample(logits, floats[0], columns[0], floats[1], columns[1], columns[2])
        sequence.append(token.item())
        if sequence[-1] in stops or new + 1 == max_new_tokens:
            return sequence[len(prompt) :]


def prompt_of(length, seed=0):
    return random.Random(seed).choices(range(1, VOCABULARY), k=length)


def some_sampling(dice):
    if dice.random() < 0.5:
        return Sampling()
    return Sampling(
        temperature=dice.choice([0.3, 1.0, 2.0]),
        top_k=dice.choice([0, 1, 5]),
        top_p=dice.choice([1.0, 0.9, 0.2]),
        seed=dice.getrandbits(60),
    )


def test_requests_that_join_and_leave_a_batch_give_the_tokens_they_give_alone():
    model = FakeModel()
    engine = Engine(model, kv_memory=40, max_batch=3, prompt_chunk=50)
    dice = random.Random(1)
    requests = []
    for number, length in enumerate([1, 49, 50, 51, 127, 128, 129, 300]):
        sampling = some_sampling(dice)
        requests.append(engine.add(prompt_of(length, number), max_new_tokens=5 + 20 * (number % 3), sampling=sampling))
        engine.step()
    engine.run()
    for request in requests:
        assert request.tokens == alone(request.prompt, request.max_new_tokens, request.sampling)
        assert request.finish_reason == ("stop" if request.tokens[-1] == END else "length")
    assert max(map(len, model.batches)) == 3
    assert max(model.chunks) == 50
    assert model.pool.used == 0


@pytest.mark.parametrize(("requests", "rows"), [(1, 1), (2, 2), (3, 4)])
def test_a_processor_computes_few_rows_for_few_requests(requests, rows):
    class Watched(FakeModel):
        def __call__(self, **given):
            shapes.append(tuple(given["input_ids"].shape))
            return self.forward(**given)

    shapes = []
    engine = Engine(Watched(), max_batch=32)
    for seed in range(requests):
        engine.add(prompt_of(5, seed), max_new_tokens=4, stop_token_ids=[])
    engine.run()
    assert shapes == [(1, 5 * requests), *[(rows, 1)] * 3]


def test_a_request_that_moves_to_a_lower_row_keeps_its_sampling_and_its_constraint():
    class EveryOther(LogitsProcessor):
        def __call__(self, ids, logits):
            return logits.index_fill(1, torch.arange(ids.shape[1] % 2, VOCABULARY, 2), -math.inf)

    def tokens(rows):
        model = FakeModel()
        model._get_logits_processor = lambda *given: given[4]  # no settings but the constraint
        engine = Engine(model, max_batch=rows)
        options = [{}, {"sampling": Sampling(temperature=2.0, seed=5)}, {"constraint": EveryOther()}]
        requests = [
            engine.add(prompt_of(7, n), max_new_tokens=4 + 5 * n, stop_token_ids=[], **own)
            for n, own in enumerate(options)
        ]
        engine.run()
        return engine._steps.model.batches, [request.tokens for request in requests]

    (batches, together), (_, apart) = tokens(3), tokens(1)
    assert together == apart
    assert batches[-1] == [0]


@pytest.mark.parametrize(
    ("pages", "lag"),
    [(12, 1), *(pytest.param(pages, lag, marks=pytest.mark.full) for pages, lag in ((None, 0), (None, 1), (12, 0)))],
)
def test_a_soak_leaks_nothing_starves_none_and_changes_no_tokens(pages, lag):
    dice = random.Random(f"{pages} {lag}")
    model = FakeModel()
    engine = Engine(model, kv_memory=pages, max_batch=5, prompt_chunk=200)
    engine._steps.lag = lag
    count = todo = 500 if pages is None or not lag else 80
    admitted, requests, cancelled = [], [], set()

    def states():
        for request in requests:
            if request.state != "waiting" and request.id not in cancelled and request.id not in admitted:
                admitted.append(request.id)

    while todo or engine._busy():
        for _ in range(min(todo, dice.choice([0, 0, 1, 2]))):
            todo -= 1
            length = dice.choice([1, 3, 127, 128, 129, dice.randint(1, 600)])
            prompt = prompt_of(length, dice.getrandbits(30))
            requests.append(engine.add(prompt, max_new_tokens=dice.randint(1, 30), sampling=some_sampling(dice)))
        going = [request for request in requests[-12:] if not request.finished]
        if going and dice.random() < 0.1:
            request = dice.choice(going)
            states()
            cancelled.add(request.id)
            request.cancel()
            assert request.finish_reason == "cancelled"
        engine.step()
        states()
        stats = engine.stats()
        assert stats.running <= 5
        assert pages is None or stats.pages_reserved <= pages
        assert model.pool.used <= stats.pages_reserved
    served = [number for number in admitted if number not in cancelled]
    assert served == sorted(served)
    for request in requests:
        expected = alone(request.prompt, request.max_new_tokens, request.sampling)
        if request.finish_reason == "cancelled":
            assert request.tokens == expected[: len(request.tokens)]
            assert request.id in cancelled
        else:
            assert request.tokens == expected
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.pages_reserved, model.pool.used) == (0, 0, 0, 0)
    assert engine._scheduler.free_rows == 5
    assert (stats.finished, stats.cancelled, stats.failed) == (count - len(cancelled), len(cancelled), 0)
    assert len(cancelled) > count // 25
    assert stats.generated_tokens == sum(len(request.tokens) for request in requests)


def test_threads_that_add_cancel_and_stream_while_others_step_disturb_nobody():
    model = FakeModel()
    engine = Engine(model, kv_memory=20, max_batch=4, prompt_chunk=64)
    over = threading.Event()
    server = threading.Thread(target=engine.run, args=[over])
    server.start()
    failures, streamed = [], []

    def client(seed):
        try:
            dice = random.Random(seed)
            for _ in range(15):
                prompt = prompt_of(dice.randint(1, 200), dice.getrandbits(30))
                request = engine.add(prompt, max_new_tokens=dice.randint(1, 20), sampling=some_sampling(dice))
                leave_after = dice.choice([math.inf, math.inf, 1, 3])
                tokens = []
                for event in engine.stream(request):
                    tokens += event.tokens
                    if len(tokens) >= leave_after:
                        break
                expected = alone(prompt, request.max_new_tokens, request.sampling)
                assert tokens == expected[: len(tokens)]
                assert leave_after != math.inf or tokens == expected
                streamed.append(request)
        except BaseException as error:
            failures.append(error)

    clients = [threading.Thread(target=client, args=[seed]) for seed in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(timeout=120)
    engine.run()
    over.set()
    server.join(timeout=10)
    assert not failures
    assert not server.is_alive()
    assert len(streamed) == 90
    assert all(request.finished for request in streamed)
    assert model.pool.used == 0
    assert engine.stats().pages_reserved == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_cancelled_in_any_state_frees_its_pages_at_once(steps, lag):
    model = FakeModel()
    engine = Engine(model, kv_memory=6, max_batch=2, prompt_chunk=100)
    engine._steps.lag = lag
    heard = []
    first = engine.add(prompt_of(250), max_new_tokens=100, stop_token_ids=[], on_event=heard.append)
    waiting = engine.add(prompt_of(500), max_new_tokens=100, stop_token_ids=[])
    for _ in range(steps):
        engine.step()
    assert first.state == ("prompt" if steps < 3 else "running")
    assert waiting.state == "waiting"
    waiting.cancel()
    first.cancel()
    assert {first.state, waiting.state} == {"finished"}
    assert heard[-1].finish_reason == "cancelled"
    assert model.pool.used == 0
    assert engine.stats().pages_free == 6
    first.cancel()
    assert engine.stats().cancelled == 2
    engine.run()
    assert first.tokens == alone(first.prompt, 100, first.sampling, stops=())[: len(first.tokens)]


def test_a_request_that_cancels_itself_from_its_own_event_ends_after_that_step():
    model = FakeModel()
    engine = Engine(model, kv_memory=6)
    request = engine.add(
        prompt_of(10), stop_token_ids=[], on_event=lambda event: len(event.request.tokens) >= 3 and request.cancel()
    )
    engine.run()
    assert request.finish_reason == "cancelled"
    assert len(request.tokens) == 3
    assert model.pool.used == 0


def test_a_large_request_at_the_head_of_the_queue_is_not_overtaken():
    engine = Engine(FakeModel(), kv_memory=4, max_batch=8)
    small = engine.add(prompt_of(10), max_new_tokens=20, stop_token_ids=[])
    large = engine.add(prompt_of(400), max_new_tokens=100, stop_token_ids=[])
    later = engine.add(prompt_of(10), max_new_tokens=20, stop_token_ids=[])
    assert [request.state for request in (small, large, later)] == ["prompt", "waiting", "waiting"]
    while not small.finished:
        assert large.state == later.state == "waiting"
        engine.step()
    engine.step()
    assert large.state == "running"
    assert later.state == "waiting"
    engine.run()
    assert later.finish_reason == "length"


def test_what_can_never_be_served_is_refused_with_one_sentence():
    engine = Engine(FakeModel(max_positions=2000), kv_memory=4, max_batch=2)
    cases = [
        ({"prompt": []}, "no tokens"),
        ({"prompt": torch.zeros(2, 3, dtype=torch.long)}, "one sequence"),
        ({"prompt": [1, VOCABULARY]}, f"token {VOCABULARY}"),
        ({"prompt": [1] * 1500, "max_new_tokens": 501}, "2,000 positions"),
        ({"prompt": [1] * 500, "max_new_tokens": 13}, "needs 5 pages of the cache and there are 4"),
        ({"prompt": [1], "stop": ["x"]}, "`tokenizer`"),
        ({"prompt": torch.tensor([1.5])}, "`prompt` has the dtype torch.float32"),
        (
            {"prompt": [1], "stop_token_ids": [VOCABULARY]},
            f"`stop_token_ids` has {VOCABULARY}; the model's ids are 0 to",
        ),
    ]
    for arguments, said in cases:
        with pytest.raises(UsageError, match=said) as caught:
            engine.add(**arguments)
        assert "\n" not in str(caught.value)
    assert engine.stats().refused == len(cases)
    # What no request can be is refused before it counts as one.
    for arguments, said in (
        ({"prompt": [1.5]}, r"`prompt` is \[1\.5\]; give the ids of its tokens"),
        ({"prompt": [1], "max_new_tokens": 0}, "`max_new_tokens` is 0; give a whole number of at least 1"),
        ({"prompt": [1], "stop": "x"}, "`stop` is 'x'; give a list of strings"),
        (
            {"prompt": [1], "stop_token_ids": ["</s>"]},
            r"`stop_token_ids` is \['</s>'\]; give a list, each entry a whole",
        ),
        ({"prompt": [1], "sampling": {"temperature": 1}}, r"`sampling` is \{'temperature': 1\}; give a Sampling"),
    ):
        with pytest.raises(UsageError, match=said):
            engine.add(**arguments)
    assert engine.stats().refused == len(cases)
    assert engine.add([1] * 500, max_new_tokens=12).state == "prompt"


@pytest.mark.parametrize("limit", [0, 2])
def test_a_full_queue_refuses_and_takes_requests_again_later(limit):
    engine = Engine(FakeModel(), max_batch=2, max_waiting=limit)
    first = [engine.add([1, 2], max_new_tokens=4, stop_token_ids=[]) for _ in range(2 + limit)]
    with pytest.raises(QueueFullError, match=f"{limit} requests are waiting"):
        engine.add([1])
    while not first[0].finished:
        engine.step()
    engine.add([1, 2], max_new_tokens=4)
    engine.run()
    stats = engine.stats()
    assert (stats.finished, stats.refused) == (3 + limit, 1)


@pytest.mark.parametrize(
    "arguments", [{"max_batch": 0}, {"prompt_chunk": 0}, {"max_waiting": -1}, {"max_batch_tokens": 100}]
)
def test_arguments_that_make_no_engine_are_refused(arguments):
    with pytest.raises(UsageError, match=next(iter(arguments))):
        Engine(FakeModel(), **arguments)


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "assistant_model"])
def test_drafts_are_refused_by_name(name):
    with pytest.raises(UsageError, match=f"takes no `{name}`"):
        Engine(FakeModel(), **{name: 4})


def test_a_cache_without_room_for_a_page_and_a_model_without_a_plan_are_refused():
    with pytest.raises(UsageError, match="not enough for one page"):
        Engine(FakeModel(), kv_memory=0)
    with pytest.raises(UnsupportedModelError, match=r"KV plan; convert it with a low-bit cache, .* or call its"):
        Engine(torch.nn.Linear(2, 2))


def fail_once(model, when=lambda number, tokens: True, error=MemoryError):
    """Let the model's cache fail in the first segment for which `when(number, tokens)` is true."""

    def fail(number, tokens):
        if when(number, tokens):
            model.before_segment = lambda number, tokens: None
            raise error

    model.before_segment = fail


@pytest.mark.parametrize("failing", ["prompt", "rows"])
@pytest.mark.parametrize("lag", [0, 1])
def test_when_a_part_of_the_cache_fails_its_requests_are_lost_and_the_others_in_the_pass_go_on(failing, lag):
    model = FakeModel()
    engine = Engine(model, kv_memory=20, max_batch=4, prompt_chunk=10)
    engine._steps.lag = lag
    rows = [engine.add(prompt_of(5, n), max_new_tokens=30, stop_token_ids=[]) for n in range(2)]
    engine.step()
    prompts = [engine.add(prompt_of(25, n), max_new_tokens=30, stop_token_ids=[]) for n in range(2)]
    fail_once(model, lambda number, tokens: number == (2 if failing == "prompt" else 0))
    with pytest.raises(MemoryError):
        engine.step()
    lost = [prompts[1]] if failing == "prompt" else rows
    assert all(list(engine.stream(request))[-1].finish_reason == "error" for request in lost)
    engine.run()
    for request in {*rows, *prompts} - {*lost}:
        assert request.tokens == alone(request.prompt, 30, request.sampling, stops=())
    assert model.pool.used == 0
    assert engine.stats().failed == len(lost)


def test_when_the_model_fails_the_requests_in_the_pass_are_lost_and_the_others_go_on():
    model = FakeModel()
    engine = Engine(model, kv_memory=20, max_batch=2, prompt_chunk=10)
    lost = [engine.add(prompt_of(n), max_new_tokens=30, stop_token_ids=[]) for n in (5, 25)]
    engine.step()
    assert [request.state for request in lost] == ["running", "prompt"]
    waiting = engine.add(prompt_of(25), max_new_tokens=30, stop_token_ids=[])
    single = engine.add(prompt_of(5), max_new_tokens=30)

    def fail():
        model.before_pass = lambda: None
        single.cancel()
        raise MemoryError

    model.before_pass = fail
    with pytest.raises(MemoryError):
        engine.step()
    assert [request.finish_reason for request in (*lost, single)] == ["error", "error", "cancelled"]
    engine.run()
    assert waiting.tokens == alone(waiting.prompt, 30, waiting.sampling, stops=())
    assert model.pool.used == 0


def test_tokens_chosen_on_a_gpu_outlive_the_failure_of_the_pass_after_them():
    model = FakeModel()
    engine = Engine(model, kv_memory=20, max_batch=3)
    engine._steps.lag = 1
    single = engine.add(prompt_of(25), max_new_tokens=1)
    engine.step()
    assert not single.finished
    lost = engine.add(prompt_of(15), max_new_tokens=30, stop_token_ids=[])
    fail_once(model)
    with pytest.raises(MemoryError):
        engine.step()
    assert lost.finish_reason == "error"
    engine.run()
    assert single.tokens == alone(single.prompt, 1, single.sampling)
    assert model.pool.used == 0


def test_short_prompts_share_a_pass_with_each_other_and_with_all_running_requests():
    model = FakeModel()
    engine = Engine(model, max_batch=8, prompt_chunk=60, max_batch_tokens=100)
    running = [engine.add(prompt_of(3, n), max_new_tokens=50, stop_token_ids=[]) for n in range(2)]
    engine.step()
    model.chunks.clear()
    model.batches.clear()
    long, *short = (engine.add(prompt_of(n, n), max_new_tokens=50, stop_token_ids=[]) for n in (150, 30, 60, 10))
    read = []
    for _ in range(3):
        engine.step()
        read.append(list(model.chunks))
        model.chunks.clear()
    # A chunk that does not fit waits, and later ones that do go with the pass.
    assert read == [[60, 30, 10], [60], [30, 60]]
    assert len(model.batches) == 3
    assert [len(request.tokens) for request in running] == [4, 4]
    assert [len(request.tokens) for request in (long, *short)] == [1, 3, 1, 3]
    engine.run()
    for request in (*running, long, *short):
        assert request.tokens == alone(request.prompt, 50, request.sampling, stops=())


@pytest.mark.parametrize("lag", [0, 1])
def test_when_tokens_cannot_be_read_the_requests_whose_they_are_end(lag):
    model = FakeModel()
    engine = Engine(model, kv_memory=20, max_batch=2)
    engine._steps.lag = lag
    lost = [engine.add(prompt_of(15, n), max_new_tokens=30, stop_token_ids=[]) for n in range(2)]
    waiting = engine.add(prompt_of(15), max_new_tokens=3, stop_token_ids=[])
    for _ in range(3):
        engine.step()
    fetch = engine._steps.fetch

    def failing(tokens):
        engine._steps.fetch = fetch
        return lambda: 1 // 0

    engine._steps.fetch = failing
    for _ in range(lag):
        engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert [request.finish_reason for request in lost] == ["error"] * 2
    engine.run()
    assert waiting.tokens == alone(waiting.prompt, 3, waiting.sampling, stops=())
    assert model.pool.used == 0


@pytest.mark.parametrize("error", [MemoryError("no room"), NumericError("NaN")])
def test_serving_goes_on_after_a_failed_step_and_a_failed_listener_and_logs_both(caplog, error):
    model = FakeModel()
    engine = Engine(model, kv_memory=20, max_batch=2)
    over = threading.Event()
    server = threading.Thread(target=engine.run, args=[over])
    fail_once(model, error=error)
    server.start()
    lost = engine.add(prompt_of(15), max_new_tokens=5)
    while not lost.finished:
        time.sleep(0.01)
    assert lost.finish_reason == "error"
    deaf = engine.add(prompt_of(15), max_new_tokens=5, stop_token_ids=[], on_event=lambda event: 1 // 0)
    assert sum(len(event.tokens) for event in engine.stream(deaf)) == 5
    over.set()
    server.join(timeout=10)
    assert not server.is_alive()
    messages = [record.getMessage() for record in caplog.records]
    (failed,) = (record for record in caplog.records if "A step of the engine failed" in record.getMessage())
    assert failed.getMessage().endswith(f"({error})")
    assert bool(failed.exc_info) == isinstance(error, MemoryError)  # ours says all that an operator can use
    assert any(f"on_event of request {deaf.id} failed" in message for message in messages)
    assert model.pool.used == 0


def test_a_stream_raises_the_failure_of_its_own_step_and_outlives_that_of_others(caplog):
    model = FakeModel()
    engine = Engine(model, kv_memory=20, max_batch=2, prompt_chunk=10)
    fail_once(model)
    other, request = engine.add(prompt_of(5)), engine.add(prompt_of(5), max_new_tokens=6, stop_token_ids=[])
    assert sum(len(event.tokens) for event in engine.stream(request)) == 6
    assert other.finish_reason == "error"
    assert "A step of the engine failed" in caplog.text
    fail_once(model)
    with pytest.raises(MemoryError):
        list(engine.stream(engine.add(prompt_of(5))))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_stop_token_that_comes_first_is_the_only_token(lag):
    # On a GPU the pass after it has begun when the stop token is read: what comes after it is dropped.
    prompt = prompt_of(5)
    (first,) = alone(prompt, 1, Sampling())
    model = FakeModel()
    engine = Engine(model)
    engine._steps.lag = lag
    request = engine.add(prompt, stop_token_ids=[first])
    engine.run()
    assert (request.tokens, request.finish_reason) == ([first], "stop")
    assert engine.stats().generated_tokens == 1
    assert model.pool.used == 0


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(id + 1000) for id in ids)


def test_text_held_back_for_a_stop_string_comes_with_the_last_event():
    prompt = prompt_of(5)
    tokens = alone(prompt, 4, Sampling(), stops=())
    text = Letters().decode(tokens, True)
    for options, shown, reason in (
        ({"stop": [text[2:4] + "!"], "max_new_tokens": 4}, text, "length"),
        ({"stop": [text[2] + "!"], "stop_token_ids": [tokens[3]]}, text[:3], "stop"),
        ({"stop": [text[1:3]]}, text[:1], "stop"),
    ):
        engine = Engine(FakeModel(), Letters())
        request = engine.add(prompt, **{"stop_token_ids": []} | options)
        events = list(engine.stream(request))
        assert "".join(event.text for event in events) == request.text == shown
        assert events[-1].finish_reason == request.finish_reason == reason


def test_steps_report_every_token_once_and_in_order():
    engine = Engine(FakeModel(), max_batch=2)
    heard = []
    requests = [
        engine.add(prompt_of(5, n), max_new_tokens=6, stop_token_ids=[], on_event=heard.append) for n in range(3)
    ]
    events = []
    while engine.stats().finished < 3:
        events += engine.step()
    assert heard == events
    for request in requests:
        own = [event for event in events if event.request is request]
        assert [token for event in own for token in event.tokens] == request.tokens
        assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + ["length"]


def test_every_draw_without_a_seed_has_one_of_its_own_and_can_be_repeated_with_it():
    engine = Engine(FakeModel())
    hot = Sampling(temperature=3.0)
    first, second = (engine.add(prompt_of(5), max_new_tokens=20, sampling=hot, stop_token_ids=[]) for _ in range(2))
    engine.run()
    assert first.tokens != second.tokens
    again = engine.add(prompt_of(5), max_new_tokens=20, sampling=first.sampling, stop_token_ids=[])
    engine.run()
    assert again.tokens == first.tokens
