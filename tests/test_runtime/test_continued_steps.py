"""Steps that continue the step before them leave what steps leave that are planned, and write the same tables."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from kvconvert import KVCache, KVScheme
from kvconvert.errors import CacheError
from kvconvert.kernels.attention import Scoring
from kvconvert.runtime.cache import steps
from kvconvert.runtime.cache.attend import attend, commit
from kvconvert.runtime.cache.compress import end_forward
from kvconvert.runtime.cache.forward_pass import PassTokens
from kvconvert.runtime.cache.group_tables import GroupTables
from kvconvert.runtime.cache.pool import BUFFER_GROWTH, CPU_GROWTH, GPU_GROWTH
from kvconvert.runtime.cache.steps import PlannedStep

DIM, STEPS = 16, 300
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": DIM}
# Scheme and sliding window.
CASES = {
    "equal windows": (KVScheme(), None),
    "sink tokens": (KVScheme(sink_tokens=5, key_recent_tokens=20, value_recent_tokens=20), None),
    "keys stay longer": (KVScheme(key_recent_tokens=140, sink_tokens=3), None),
    "values stay longer": (KVScheme(value_recent_tokens=129, sink_tokens=5), None),
    "16 bits": (KVScheme(key_bits=16, value_bits=16, sink_tokens=4), None),
    "sliding window": (KVScheme(sink_tokens=4), 131),
    "window shorter than recent tokens": (KVScheme(key_recent_tokens=200, value_recent_tokens=60), 90),
    "spans": (replace(KVScheme.preset("calibquant-2bit"), sink_tokens=2), None),
    "eviction": (replace(KVScheme.preset("minikv"), key_group_size=32), None),
}
# Of three rows: (step, row, tokens of the prompt that joins; None where the row's sequence leaves).
MOVES = [(0, 0, 120), (0, 1, 1), (3, 2, 259), (40, 1, None), (70, 1, 126), (150, 0, None), (150, 0, 3), (260, 2, None)]


def tokens_at(position: int, count: int, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [rows, 1, count, DIM] that depend on positions alone."""
    generator = torch.Generator().manual_seed(position)
    return tuple(torch.randn(rows, 1, count, DIM, generator=generator) for _ in range(2))


@pytest.fixture(autouse=True)
def growth(request, monkeypatch):
    """How buffers grow: as on a GPU, unless a test says otherwise."""
    growth = getattr(request, "param", GPU_GROWTH)
    monkeypatch.setitem(BUFFER_GROWTH, "cpu", growth)
    return growth


class Stepped:
    """A cache of three rows, stepped without a model.

    Args:
        continues: whether steps may continue the step before them.
    """

    def __init__(self, scheme, window, continues):
        config = MistralConfig(**SHAPE, sliding_window=window) if window else LlamaConfig(**SHAPE)
        self.cache, self.continues, self.continued = KVCache(config, scheme), continues, 0
        self.cache.open_rows(3)
        (self.group,) = self.cache.groups

    def move(self, row, length):
        if length is None:
            self.cache.leave(row)
            return
        prompt = self.cache.beside()
        for layer in prompt.layers:
            keys, values = tokens_at(row + 1, length)
            layer.update(keys, values)
            chunk = PassTokens(torch.arange(length))
            commit(layer.store, chunk)
            attend(layer.store, keys, chunk, Scoring(0.25))
            end_forward(layer.store)
        prompt.seal()
        self.cache.join(row, prompt)

    def step(self, number):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvconvert.runtime.cache.steps.runs_triton", lambda device: True)
            if not self.continues:
                patch.setattr(steps, "_continues", lambda group: False)
            step = PlannedStep(self.cache.groups)
        self.continued += step.continues
        (tables,) = step.tables
        tables.spread_step()
        tables.work(self.group, self.group.sequences, 4)
        # Those of a step that is planned are written anew.
        if self.continues or number % 10 == 0:
            self.check_tables(tables)
        for store in self.group.stores:
            self.write(store, tables, number)
        step.finish()

    def write(self, store, tables, number):
        """What the kernel does: the new tokens go to where the tables say."""
        layer = self.group.stores.index(store)
        keys, values = tokens_at(1000 + number, 1, 3)
        for row, index in enumerate(tables.step[0].tolist()):
            if index < 0:
                continue
            side = self.group.sequences[row]
            buffers = (store.rows[row].keys, side.keys, keys), (store.rows[row].values, side.values, values)
            for at, (buffer, held, new) in zip((0, 2), buffers, strict=True):
                address, stride = tables.appends[layer, row, at : at + 2].tolist()
                target = buffer.tensor[:, held.buffered - 1]
                assert tables.base.data_ptr() + 4 * (address + index * DIM) == target.data_ptr()
                assert stride == buffer.head_stride
                target.copy_(new[row, :, 0])

    def check_tables(self, tables):
        """The tables say what tables say that are written anew."""
        group, rows = self.group, range(3)
        fresh = GroupTables(group.stores, 3, tables.entries)
        fresh.base = tables.base
        fresh.write(group, group.stores, group.sequences, list(rows))
        for row, sequence in enumerate(group.sequences):
            if not sequence.occupied:
                assert tables.step[0, row] == -1
                continue
            begin = row * tables.entries
            used = slice(begin, begin + sequence.pages + sum(-(-span.tokens // 128) for span in sequence.spans))
            assert torch.equal(tables.keys[:, used], fresh.keys[:, used])
            assert torch.equal(tables.values[:, used], fresh.values[:, used])
            described, expected = tables.described[:, row], fresh.described[:, row].clone()
            if not sequence.pages:
                # Sink tokens matter where others are skipped after them, and a short prompt's grow step by step.
                expected[:, 4] = described[:, 4]
            assert torch.equal(described, expected)
            assert torch.equal(tables.appends[:, row], fresh.appends[:, row])
            assert tables.step[:, row].tolist() == [
                sequence.keys.buffered - 1, sequence.residual, group.logical - 1
            ]  # fmt: skip
            assert tables.plans[row]._replace(residual=0) == fresh.plans[row]._replace(residual=0)
            assert tables.plans[row].residual >= sequence.residual
            if group.sliding_window and not sequence.kept:
                stored = sequence.pages * 128 + sequence.residual
                assert torch.equal(tables.positions[row, :stored], fresh.positions[row, :stored])


def same(one: Stepped, other: Stepped) -> None:
    """Two caches hold the same tokens in the same places."""
    assert (one.group.logical, one.group.attended) == (other.group.logical, other.group.attended)
    assert one.cache.stats() == other.cache.stats()
    for mine, theirs in zip(one.group.stores, other.group.stores, strict=True):
        assert mine.sequences == theirs.sequences == one.group.sequences
        for row, sequence in enumerate(mine.sequences):
            for side in ("keys", "values"):
                a, b = getattr(mine.rows[row], side), getattr(theirs.rows[row], side)
                held = getattr(sequence, side)
                assert torch.equal(a.tokens(0, held.buffered), b.tokens(0, held.buffered))
                if held.pages:
                    a, b = (getattr(s, f"{side.removesuffix('s')}_pages").read(held.pages) for s in (mine, theirs))
                    assert torch.equal(a.buffer, b.buffer)


@pytest.mark.quick("sliding window", "eviction")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "growth",
    [pytest.param(CPU_GROWTH, id="short buffers", marks=pytest.mark.full), pytest.param(GPU_GROWTH, id="long buffers")],
    indirect=True,
)
def test_steps_without_planning_leave_what_planned_steps_leave(name, growth):
    caches = [Stepped(*CASES[name], continues) for continues in (True, False)]
    for number in range(STEPS):
        for at, row, length in MOVES:
            if at == number:
                for cache in caches:
                    cache.move(row, length)
        for cache in caches:
            cache.step(number)
        if number % 10 == 0 or number in (126, 127, 128, 129):
            same(*caches)
    same(*caches)
    # Rows are planned anew where one of them joins, leaves, writes or drops a page, or needs longer buffers.
    assert caches[0].continued > STEPS * (0.7 if growth is CPU_GROWTH else 0.85)
    assert caches[1].continued == 0


@pytest.mark.quick("7")
@pytest.mark.parametrize("every", [1, 7])
def test_asking_for_the_sequences_between_steps_changes_nothing(every):
    scheme = KVScheme(sink_tokens=4, value_recent_tokens=60)
    asked, silent = (Stepped(scheme, None, True) for _ in range(2))
    for cache in (asked, silent):
        cache.move(0, 100)
        cache.move(2, 7)
    for number in range(200):
        for cache in (asked, silent):
            cache.step(number)
        if number % every == 0:
            assert [len(sequence) for sequence in asked.group.sequences] == [100 + number + 1, 0, 7 + number + 1]
    same(asked, silent)
    assert asked.continued == silent.continued > 180


def test_a_crop_or_another_order_of_rows_is_planned_anew():
    scheme = KVScheme(sink_tokens=4)
    caches = [Stepped(scheme, None, continues) for continues in (True, False)]
    for cache in caches:
        cache.move(0, 60)
        cache.move(1, 30)
    for number in range(60):
        for cache in caches:
            if number == 20:
                cache.cache.crop(-3)
            if number == 40:
                cache.cache.reorder_cache(torch.tensor([1, 1, 2]))
            cache.step(number)
        same(*caches)
    assert 50 < caches[0].continued < 60


def test_a_recording_is_not_replayed_once_the_scales_of_spans_have_moved():
    cache = Stepped(*CASES["spans"], True)
    for row in range(3):
        cache.move(row, 130)
    cache.step(0)
    (tables,) = cache.group.registry.tables_of(cache.group)
    before = [table.data_ptr() for table in tables.shared], tables.work_key(cache.group, continues=False)
    sequence, rows = cache.group.sequences[0], [store.rows[0] for store in cache.group.stores]
    # As after a second prompt of the first row.
    cache.group.sequences = (replace(sequence, spans=sequence.spans * 2), *cache.group.sequences[1:])
    for row in rows:
        row.spans *= 2
    cache.group.touch(0)
    tables.serve(cache.group)
    assert [table.data_ptr() for table in tables.shared] != before[0]
    assert tables.work_key(cache.group, continues=False) != before[1]


def test_a_step_that_cannot_be_planned_for_all_groups_is_planned_for_none(monkeypatch):
    cache = KVCache(LlamaConfig(**SHAPE), [KVScheme(), KVScheme(sink_tokens=4)])
    keys, values = tokens_at(0, 30)
    for layer in cache.layers:
        layer.update(keys, values)
        chunk = PassTokens(torch.arange(30))
        commit(layer.store, chunk)
        attend(layer.store, keys, chunk, Scoring(0.25))
        end_forward(layer.store)
    _, second = cache.groups
    before = [(group.logical, group.passes, group.sequences, group.forward_pass) for group in cache.groups]
    monkeypatch.setattr(second.registry, "prepare_step", refusing(second.registry.prepare_step, second))
    with pytest.raises(CacheError, match="out of memory"):
        PlannedStep(cache.groups)
    assert [(group.logical, group.passes, group.sequences, group.forward_pass) for group in cache.groups] == before
    assert all(store.sequences == group.sequences for group in cache.groups for store in group.stores)
    monkeypatch.undo()
    # The next step is planned for both.
    PlannedStep(cache.groups)
    assert [group.logical for group in cache.groups] == [31, 31]


def refusing(prepare, group):
    """`TableRegistry.prepare_step`, which fails for one group."""

    def prepared(of, latest):
        if of is group:
            raise CacheError("out of memory")
        return prepare(of, latest)

    return prepared
