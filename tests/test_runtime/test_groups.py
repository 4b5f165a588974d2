"""What a group of layers plans around every page boundary: each token is somewhere, once, as a short model has it."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
from listed_layers import Cache, Layer, P, expectation

from kvconvert.errors import CacheError
from kvconvert.methods import KVScheme
from kvconvert.runtime.cache.compress import crop

# A plan of which the layers see the outcome alone.
NOTHING = partial(replace, seals=(), discards=(), keys=(), values=())
LONGEST = 3 * P + 2


def pages(**fields) -> KVScheme:
    return KVScheme(rotate_keys="none", rotate_values="none", token_norm="none", **fields)


# Scheme and sliding window.
PAGED = {
    "equal windows": (pages(), None),
    "recent tokens": (pages(key_recent_tokens=20, value_recent_tokens=20), None),
    "keys stay longer": (pages(key_recent_tokens=140, sink_tokens=3), None),
    "values stay longer": (pages(value_recent_tokens=129, sink_tokens=5), None),
    "sink tokens": (pages(sink_tokens=32), None),
    "16 bits": (pages(key_bits=16, value_bits=16, sink_tokens=4), None),
    "window of a page": (pages(sink_tokens=4), 128),
    "window shorter than recent tokens": (pages(key_recent_tokens=200, value_recent_tokens=60), 90),
    "window longer than a page": (pages(value_recent_tokens=128, sink_tokens=1), 131),
}
WHOLE = {
    "spans": KVScheme.preset("calibquant-1bit"),
    "eviction": KVScheme.preset("minikv"),
    "eviction and sink tokens": replace(KVScheme.preset("minikv"), sink_tokens=3, heavy_ratio=0.7, recent_ratio=0.2),
}


def boundaries(scheme, window):
    """Lengths around which pages are complete, or leave the window."""
    shifts = {0, scheme.sink_tokens, scheme.key_recent_tokens, scheme.value_recent_tokens}
    shifts |= {window - 1} if window else set()
    around = {page * P + shift + by for page in (1, 2) for shift in shifts for by in (-2, -1, 0, 1, 2)}
    return sorted(length for length in around if length <= LONGEST)


@pytest.mark.parametrize("name", PAGED)
def test_pages_at_every_length_in_one_pass_and_token_by_token(name):
    scheme, window = PAGED[name]
    expect = expectation(scheme, window)
    walked = Cache(scheme, window)
    for length in range(LONGEST + 1):
        if length:
            walked.feed(1)
        walked.check(expect)
        whole = Cache(scheme, window)
        if length:
            whole.feed(length)
        whole.check(expect)


@pytest.mark.parametrize("name", PAGED)
def test_pages_after_every_pair_of_chunks_around_the_boundaries(name):
    scheme, window = PAGED[name]
    expect = expectation(scheme, window)
    for first, second in itertools.combinations(boundaries(scheme, window), 2):
        cache = Cache(scheme, window)
        for tokens in (first, second - first, LONGEST - second):
            if tokens:
                cache.feed(tokens)
                cache.check(expect)


@pytest.mark.parametrize("name", PAGED)
def test_rows_with_padding_are_planned_as_if_each_were_alone(name):
    scheme, window = PAGED[name]
    cache = Cache(scheme, window, padding=(0, 3, 130))
    for tokens in (120, *[1] * 20, 110, *[1] * 20, 125, 1):
        cache.feed(tokens)
        cache.check(expectation(scheme, window))


@pytest.mark.each_value
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("chunk", [None, 1, 100])
def test_whole_prompts_of_every_length_and_the_tokens_after_them(name, chunk):
    scheme = WHOLE[name]
    lengths = range(1, LONGEST) if chunk is None else [n for n in boundaries(scheme, None) if n > 1]
    for length in lengths:
        cache = Cache(scheme, padding=(0, length // 3))
        # A single token seals the prompt before it, but for a prompt's first one.
        for start in range(0, length, chunk or length):
            cache.feed(min(chunk or length, length - start))
            cache.check()
        cache.seal()
        cache.check()
        for row, padding in enumerate(cache.padding):
            if chunk == 1 or length % (chunk or P) == 1:
                continue
            n, sequence = length - padding, cache.group.sequences[row]
            sinks = min(n, scheme.sink_tokens)
            if scheme.is_span:
                starts = range(0, n - sinks, scheme.span_tokens or length)
                spans = [min(scheme.span_tokens or length, n - sinks - start) for start in starts]
                assert [span.tokens for span in sequence.spans] == spans
                assert sequence.keys.buffered == sinks
            else:
                assert len(sequence) == min(n, sinks + round(scheme.heavy_ratio * n) + round(scheme.recent_ratio * n))
        after = [len(sequence) for sequence in cache.group.sequences]
        for tokens in (1, 1, 1):
            cache.feed(tokens)
        cache.check()
        for sequence, before in zip(cache.group.sequences, after, strict=True):
            assert len(sequence) == before + 3
            if scheme.evicts:
                assert sequence.pages == max(0, (before + 3 - scheme.key_recent_tokens) // P)


def test_each_further_prompt_becomes_a_span_of_its_own():
    cache = Cache(WHOLE["spans"])
    for tokens in (130, 1, 1, 60, 70, 1, 2, 1):
        cache.feed(tokens)
        cache.check()
    sinks = WHOLE["spans"].sink_tokens
    assert [len(span) for span in cache.layer.spans[0]] == [130 - sinks, 130, 2]


@pytest.mark.parametrize("name", [name for name, (_, window) in PAGED.items() if window is None])
@pytest.mark.parametrize("rooms", [(1, 9), (9, 1), (2, 2), (3, 9)])
def test_a_plan_that_finds_no_room_leaves_nothing_behind(name, rooms):
    scheme, window = PAGED[name]
    cache = Cache(scheme, window, padding=(0, 0, 7), rooms=rooms)
    group = cache.group
    numbers = group.key_numbers, group.value_numbers
    for tokens in (100, 20):
        cache.feed(tokens)
    before = [pool.used for pool in numbers]
    with pytest.raises(CacheError, match="out of pages"):
        cache.feed(900)
    assert [pool.used for pool in numbers] == before
    assert group.sequences == cache.layer.sequences == group.forward_pass.appended
    group.release(group.sequences)
    for pool, room in zip(numbers, rooms, strict=True):
        assert sorted(pool.reserve(room)) == list(range(room))


def test_numbers_come_back_after_resets_moves_and_leaves():
    scheme, window = PAGED["keys stay longer"]
    cache = Cache(scheme, window, padding=(0, 7, 200))
    group = cache.group
    numbers = group.key_numbers, group.value_numbers
    cache.feed(LONGEST)
    # The first row's pages are shared by two rows, the second row's by none.
    group.reorder([0, 0, 2])
    shared = group.sequences[0].values.pages
    assert len(shared) == LONGEST // P
    assert numbers[1].used == len(shared) + len(group.sequences[2].values.pages)
    group.leave(0)
    assert set(shared) <= set(group.sequences[1].values.pages)
    group.leave(1)
    assert numbers[1].used == len(group.sequences[2].values.pages) > 0
    taken = numbers[1].reserve(len(shared))
    assert not set(taken) & set(group.sequences[2].values.pages)
    numbers[1].release(taken)
    group.leave(2)
    assert [pool.used for pool in numbers] == [0, 0]


def test_sequences_move_to_free_rows_alone():
    cache = Cache(PAGED["keys stay longer"][0], padding=(0, 0, 0))
    group = cache.group
    cache.feed(LONGEST)
    first, _, last = group.sequences
    for moves in ({2: 1}, {0: 3}):
        with pytest.raises(CacheError, match="cannot move"):
            group.move_rows(moves)
    group.leave(1)
    group.move_rows({2: 1})
    assert group.sequences[:2] == cache.layer.sequences[:2] == (first, last)
    assert not group.sequences[2].occupied
    with pytest.raises(CacheError, match="cannot move"):
        group.move_rows({2: 1})


def test_a_reset_gives_all_pages_back_and_begins_anew():
    scheme, _ = PAGED["keys stay longer"]
    cache = Cache(scheme, padding=(0, 7))
    group = cache.group
    numbers = group.key_numbers, group.value_numbers
    cache.feed(LONGEST)
    assert min(pool.used for pool in numbers) > 0
    group.reset()
    assert [pool.used for pool in numbers] == [0, 0]
    assert (group.logical, group.sequences, group.real) == (0, (), None)
    cache.layer = Layer.__new__(Layer)
    group.stores, group.indices = [], []
    cache.layer.__init__(group, 2)
    cache.feed(LONGEST)
    cache.check(expectation(scheme, None))


@pytest.mark.parametrize("name", PAGED)
def test_what_was_held_back_and_cropped_is_planned_as_if_it_had_never_come(name):
    scheme, window = PAGED[name]
    for length in boundaries(scheme, window):
        cache = Cache(scheme, window)
        plan = cache.group.plan_compression

        def executed(seal, cache=cache, plan=plan):
            """What a crop compresses is done here rather than by the layers."""
            done = plan(seal)
            cache.layer.execute(done)
            return NOTHING(done)

        for tokens in (length, 1):
            cache.feed(tokens)
        for drafted, kept in ((5, 0), (5, 2), (90, 90), (128, 1), (1, 1)):
            cache.group.record_past = True
            cache.feed(drafted)
            cache.group.plan_compression = executed
            crop(cache.group, kept - drafted)
            cache.group.plan_compression = plan
            cache.check(expectation(scheme, window))


def test_a_crop_is_refused_where_the_window_would_need_dropped_tokens_again():
    scheme, window = pages(key_recent_tokens=20, value_recent_tokens=20), 90
    for removed in (33, 34):
        cache = Cache(scheme, window)
        cache.feed(250)
        group = cache.group
        assert group.sequences[0].dropped == 1
        # The next query is at 250 - removed, and attends to the 90 positions up to its own: from 128 on.
        if removed == 33:
            crop(group, -removed)
            assert group.logical == 217
        else:
            with pytest.raises(CacheError, match="dropped tokens"):
                crop(group, -removed)
