"""Which passes over prompts are recorded, and when: recordings themselves need a GPU (tests/test_gpu)."""

import logging
from types import SimpleNamespace

import pytest
import torch
from tiny.models import low_bit, tiny_model

from kvconvert.runtime.cache.prompt_pass import TableCapacity
from kvconvert.runtime.engine.model_steps import ModelSteps
from kvconvert.runtime.hf.captured_passes import SIZES, CapturedPasses

KEEP, GPU = torch.tensor([0]), torch.device("cuda")


class Passes(CapturedPasses):
    """Launches give 1, and replays `replays`; up to `memory` tokens can be recorded."""

    def __init__(self, replays=1.0, memory=SIZES[-1]):
        super().__init__(SimpleNamespace(name="Model", recorded=1, reason=None))
        self.replays, self.memory, self.launches = torch.tensor([[replays]]), memory, 0

    def _launch(self, cache, read, keep):
        self.launches += 1
        return torch.ones(1, 1)

    def _recording(self, cache, read, keep):
        if read.shape[1] > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return SimpleNamespace(replay=lambda read, keep: self.replays, output=self.replays)

    def run(self, tokens):
        """A pass over so many tokens; launches, recordings and replays so far."""
        size = self.padded(tokens, GPU)
        assert tokens <= size
        self.logits(Pass(size), torch.zeros(2, tokens, dtype=torch.int64), KEEP)
        return self.launches, self.recorded, self.replayed


class Pass:
    """A planned pass without states, as a `PackedCache` describes it."""

    placed = None

    def __init__(self, size):
        self.key = TableCapacity.of(size), None

    def state_layers(self):
        return []

    def are_stored(self, tokens):
        return torch.ones(len(tokens), dtype=torch.bool)

    def counted_once(self):
        return torch.no_grad()


def test_a_pass_is_launched_then_recorded_then_replayed():
    passes = Passes()
    assert passes.run(100) == (1, 0, 0)
    # The first recording is compared with the layers' launches.
    assert passes.run(110) == (2, 1, 0)
    assert passes.run(120) == (2, 1, 1)
    assert passes.run(8000) == (3, 1, 1)
    assert passes.run(8000) == (3, 2, 1)


def test_while_an_engine_prepares_passes_of_further_sizes_are_recorded_at_once():
    passes = Passes()
    with passes.preparing():
        assert [passes.run(100) for _ in range(2)] == [(1, 0, 0), (2, 1, 0)]
        assert passes.run(8300) == (2, 2, 0)
        assert passes.run(3000) == (2, 3, 0)
    assert passes.run(8200) == (2, 3, 1)
    assert passes.run(500) == (3, 3, 1)


def test_passes_for_which_there_is_no_memory_run_without_graphs_and_shorter_ones_with(caplog):
    passes = Passes(memory=4000)
    with passes.preparing(), caplog.at_level(logging.WARNING):
        for tokens in (100, 100, 8300, 3000):
            passes.run(tokens)
    assert "over more than 7808 tokens run without CUDA graphs: the GPU's memory is full" in caplog.text
    assert passes.reason is None
    assert passes.recorded == 2
    assert passes.padded(8300, GPU) is None
    assert passes.padded(3000, GPU) == 3328


def test_an_engine_whose_longest_passes_are_longer_than_others_records_these_too():
    passes = Passes()
    assert passes.padded(8352, GPU) is None
    passes.include(8352)
    passes.include(8000)
    assert [passes.padded(tokens, GPU) for tokens in (8000, 8320, 8321, 8352, 8353)] == [8320, 8320, 8352, 8352, None]
    passes.include(1 << 20)
    assert passes.sizes == (*SIZES, 8352)


def test_passes_with_more_sequences_or_pages_than_tables_have_room_for_are_told_beforehand():
    room = TableCapacity.of(2048)
    assert room.takes([0] * room.sequences)
    assert not room.takes([0] * (room.sequences + 1))
    assert room.takes([128 * room.pages + 127])
    assert not room.takes([128 * room.pages, 128])


def test_replays_that_give_other_logits_are_not_used(caplog):
    passes = Passes(replays=1.1)
    with caplog.at_level(logging.WARNING):
        assert [passes.run(100) for _ in range(2)] == [(1, 0, 0), (2, 0, 0)]
    assert passes.reason == "a replay gives other logits"
    assert passes.padded(100, GPU) is None


@pytest.mark.parametrize(("chunk", "most"), [(256, 1024), (2048, 8192), (300, 8256)])
def test_an_engine_records_its_smallest_pass_first_and_then_from_the_largest_down(monkeypatch, chunk, most):
    model = low_bit(tiny_model("llama", num_hidden_layers=2), "oscar-g128")
    steps, read = ModelSteps(model, 32, None), []
    passes = model.captured.passes
    monkeypatch.setattr(passes, "padded", lambda tokens, _: next(size for size in SIZES if tokens <= size))
    monkeypatch.setattr(steps, "_read_prompts", lambda *each: read.append((*each, passes._prepares)))
    steps._record_passes(chunk, most)
    assert all(each[::2] == (chunk, True) for each in read)
    counts = [count for _, count, _ in read]
    assert counts[:3] == [32, 32, 32]
    assert counts[3] == most
    assert counts[3:] == sorted(counts[3:], reverse=True)
    assert {passes.padded(32 + count, GPU) for count in counts} == {
        size for size in SIZES if size <= passes.padded(32 + most, GPU)
    }
    assert not passes._prepares
