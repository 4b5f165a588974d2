"""Packed passes where kernels run: planned for all layers at once they give what they give layer by layer."""

import pytest
import torch
from tiny.key_centers import center_plan
from tiny.models import ARCHITECTURES, random_ids, tiny_model
from tiny.prompt_chunks import SCHEMES

from kvconvert.errors import NumericError
from kvconvert.kernels.chunked_prefill import FEWEST_QUERIES
from kvconvert.methods import KVScheme
from kvconvert.runtime.cache import prompt_pass
from kvconvert.runtime.engine.model_steps import ModelSteps, PromptChunk
from kvconvert.runtime.hf import captured_passes, packed
from kvconvert.runtime.hf.captured import prepare_steps
from kvconvert.runtime.hf.generation import adopt

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CHUNK = 130


class Steps:
    """Two rows, and prompts before and after their first chunk."""

    def __init__(self, model):
        self.steps = ModelSteps(model, 6, None)
        self.ids = torch.tensor([5, 6, 0, 0, 0, 0], device=model.device)
        for row, length in enumerate((150, 9)):
            cache = self.steps.new_prompt()
            self.pass_over(False, [(row, cache, length, 0, True)])
            self.steps.join(row, cache)
        self.positions = torch.tensor([150, 9, 0, 0, 0, 0], device=model.device)
        self.caches = [self.steps.new_prompt() for _ in range(4)]
        self.pass_over(False, [(2, self.caches[0], CHUNK, 0, False), (3, self.caches[1], CHUNK + 3, 0, False)])
        counts = ((70, CHUNK, True), (1, CHUNK + 3, True), (33, 0, False), (1, 0, True))
        self.parts = [
            (row + 2, cache, *part) for row, (cache, part) in enumerate(zip(self.caches, counts, strict=True))
        ]

    def pass_over(self, decodes, parts, failing=()):
        chunks = []
        for row, cache, count, position, last in parts:
            ids = random_ids(1, position + count, seed=row)[0, position:].tolist()
            chunks.append(PromptChunk(row, cache, ids, position, last))
        ids = self.ids, (self.positions if decodes else self.ids)
        logits, failures = self.steps.forward(*ids, decodes, chunks)
        assert [chunks.index(chunk) for chunk in failures] == list(failing)
        return logits.float()

    def every_logit(self, failing=()):
        """Of a pass over rows and prompts, and of the decoding step after it."""
        found = self.pass_over(True, self.parts, failing)
        ended = [part for number, part in enumerate(self.parts) if part[-1] and number not in failing]
        for row, cache, count, position, _ in ended:
            self.steps.join(row, cache)
            self.positions[row] = position + count
        self.positions[:2] += 1
        rows = [0, 1, *(part[0] for part in ended)]
        return torch.cat([found[rows], self.pass_over(True, [])[rows]])


def planned_passes(monkeypatch):
    """The numbers of chunks of all planned passes, which grows."""
    counts = []
    write = prompt_pass.PromptPass.write
    monkeypatch.setattr(
        prompt_pass.PromptPass, "write", lambda self, rooms: (counts.append(len(self.chunks)), write(self, rooms))[1]
    )
    return counts


def named_sequences(monkeypatch):
    """Of all tokens of planned passes the number of their sequence, and how many there are, which grows."""
    found, append = [], prompt_pass.ragged.append

    def noted(queries, keys, values, tables, *args):
        found.extend((number, len(tables.buffers)) for number in tables.tokens[:, 0].tolist())
        return append(queries, keys, values, tables, *args)

    monkeypatch.setattr(prompt_pass.ragged, "append", noted)
    return found


def low_bit(model, scheme, device, plan=None):
    model = model.to(device, torch.float16)
    adopt(model, [scheme.with_online_rotation()] * model.config.num_hidden_layers, plan or {})
    return model


def mixture():
    """A mixture of experts whose products run in float16 without the host, unlike those of transformers' default."""
    model = ARCHITECTURES["gpt_oss"].build()
    model.set_experts_implementation("batched_mm")
    return model


CASES = {
    "oscar": lambda: (tiny_model("llama", **SHAPE), KVScheme.preset("oscar-g128")),
    "kivi": lambda: (tiny_model("llama", **SHAPE), KVScheme.preset("kivi")),
    "keys stay longer": lambda: (tiny_model("llama", **SHAPE), SCHEMES["keys stay longer"]),
    "values stay longer": lambda: (tiny_model("llama", **SHAPE), SCHEMES["values stay longer"]),
    "16 and 8 bits": lambda: (tiny_model("llama", **SHAPE), SCHEMES["16 and 8 bits"]),
    "spans": lambda: (tiny_model("llama", **SHAPE), KVScheme.preset("calibquant-2bit")),
    "windows and soft caps": lambda: (ARCHITECTURES["gemma2"].build(), KVScheme.preset("kivi")),
    "sink logits": lambda: (mixture(), KVScheme.preset("kivi")),
    "centers": lambda: (
        tiny_model("llama", **SHAPE),
        KVScheme(rotate_keys="hadamard", key_center="calibrated", sink_tokens=3),
        center_plan(2, 2, 16),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_planned_pass_gives_the_logits_of_one_layer_by_layer(device, monkeypatch, name):
    model, *arguments = CASES[name]()
    model = low_bit(model, arguments[0], device, *arguments[1:])
    with monkeypatch.context() as patch:
        patch.setattr(packed, "unplanned", lambda groups, length: "layer by layer is wanted")
        patch.setattr(packed, "can_plan_steps", lambda groups: False)
        # Few queries would read pages as they are stored, with other roundings.
        patch.setitem(FEWEST_QUERIES, "cuda", 32)
        apart = Steps(model)
        expected = apart.every_logit()
    counts, sequences = planned_passes(monkeypatch), named_sequences(monkeypatch)
    together = Steps(model)
    found = together.every_logit()
    assert counts == [1, 2, 4]
    # Decoding rows have none, and what a kernel reads before the first may lie outside of all memory.
    assert all(0 <= number < count for number, count in sequences)
    # A single token reads pages as they are stored; random models have large logits, and codes may change places.
    assert ((found - expected).norm(dim=1) < 3e-2 * expected.norm(dim=1)).all()
    for one, other in ((together.steps.cache, apart.steps.cache), (together.caches[2], apart.caches[2])):
        stats = one.stats()
        assert stats.fallbacks == 0
        assert (stats.tokens, stats.pages, stats.bytes_used) == (
            other.stats().tokens,
            other.stats().pages,
            other.stats().bytes_used,
        )


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["minikv"])
def test_what_is_not_planned_goes_layer_by_layer_in_the_same_pass(device, monkeypatch, scheme):
    """Attention masses, which no kernel of several prompts adds up."""
    model = low_bit(tiny_model("llama", **SHAPE), KVScheme.preset(scheme), device)
    counts = planned_passes(monkeypatch)
    Steps(model).every_logit()
    assert not counts


@pytest.mark.full
def test_a_mask_that_is_neither_causal_nor_the_window_is_attended_to_prompt_by_prompt(device, monkeypatch):
    model = low_bit(tiny_model("llama", **SHAPE), KVScheme.preset("kivi"), device)
    expected = Steps(model).every_logit()
    monkeypatch.setattr(packed, "shows_window", lambda function, window: False)
    counts = planned_passes(monkeypatch)
    found = Steps(model).every_logit()
    assert counts == [1, 2, 4]
    assert ((found - expected).norm(dim=1) < 1e-2 * expected.norm(dim=1)).all()


@pytest.mark.full
def test_a_prompt_that_cannot_be_stored_leaves_the_others_of_its_pass_alone(device, monkeypatch):
    model = low_bit(tiny_model("llama", **SHAPE), KVScheme.preset("kivi"), device)
    expected = Steps(model).every_logit()
    finish = prompt_pass.PromptPass.finish

    def fail(chunk):
        if chunk.length == 70:
            raise NumericError("not a number")
        finish(chunk)

    steps = Steps(model)
    monkeypatch.setattr(prompt_pass.PromptPass, "finish", staticmethod(fail))
    found = steps.every_logit(failing=[0])
    others = expected[[0, 1, 3, 4, 5, 6, 8, 9]]
    assert ((found - others).norm(dim=1) < 1e-2 * others.norm(dim=1)).all()


@pytest.mark.full
@pytest.mark.parametrize("count", [20, 40])  # pages are read as they are stored, or dequantized at first
def test_later_chunks_of_several_prompts_read_their_own_pages(device, monkeypatch, count):
    monkeypatch.setattr(packed, "unplanned", lambda groups, length: "layer by layer is wanted")
    # Differences of attention are seen in logits.
    model = tiny_model("llama", **SHAPE, gain=3.0).to(device, torch.bfloat16)
    adopt(model, [KVScheme.preset("oscar-g128").with_online_rotation()] * 2, {})
    found = []
    for in_one_pass in (True, False):
        some = Steps(model)
        # Caches that have held a prompt before know the shapes of their layers.
        lengths, caches = (270, 140), some.caches[::2]
        for cache in caches:
            cache.reset()
            cache.begin_prompt()
        for row, cache, length in zip((2, 3), caches, lengths, strict=True):
            some.pass_over(False, [(row, cache, length, 0, False)])
        later = [(row, cache, count, length, True) for row, cache, length in zip((2, 3), caches, lengths, strict=True)]
        logits = [some.pass_over(False, parts) for parts in ([later] if in_one_pass else [[part] for part in later])]
        found.append(torch.stack([logits[0][2], logits[-1][3]]))
    assert ((found[0] - found[1]).norm(dim=1) < 2e-2 * found[1].norm(dim=1)).all()


@pytest.mark.full
@pytest.mark.parametrize("name", ["oscar", "windows and soft caps", "keys stay longer", "centers"])
def test_passes_in_fixed_rooms_give_what_they_give_in_their_own(device, monkeypatch, name):
    """As recorded passes are: padded, and with tables for more."""
    model, *arguments = CASES[name]()
    model = low_bit(model, arguments[0], device, *arguments[1:])
    expected = Steps(model).every_logit()
    asked = []
    monkeypatch.setattr(captured_passes.CapturedPasses, "padded", lambda self, tokens, device: 320)
    monkeypatch.setattr(
        captured_passes.CapturedPasses,
        "logits",
        lambda self, cache, read, keep: asked.append(cache.key) or launch(self, cache, read, keep),
    )

    def launch(self, cache, read, keep):
        return self._launch(cache, torch.nn.functional.pad(read, (0, 320 - read.shape[1])), keep)

    found = Steps(model).every_logit()
    # Rows that rest while prompts are read are not computed, so that those passes are not like recorded ones.
    assert len(asked) == 1
    assert ((found - expected).norm(dim=1) < 1e-2 * expected.norm(dim=1)).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", list(CASES))
def test_recorded_passes_give_what_launches_give(monkeypatch, name):
    device = torch.device("cuda")
    model, *arguments = CASES[name]()
    model = low_bit(model, arguments[0], device, *arguments[1:])
    expected = Steps(model).every_logit()
    # As an Engine does when it is made.
    prepare_steps(model, [1] * 6, 2)
    assert model.captured.reason is None
    for _ in range(4):
        found = Steps(model).every_logit()
        assert ((found - expected).norm(dim=1) < 3e-2 * expected.norm(dim=1)).all()
    passes = model.captured.passes
    assert passes.reason is None
    assert passes.recorded >= 1
    assert passes.replayed >= 2
