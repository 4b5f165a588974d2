"""Packed passes where kernels run: rows, first chunks and later ones in one pass give what passes of their own give."""

import pytest
import torch
from tiny.models import random_ids, tiny_model

from kvconvert.methods import KVScheme
from kvconvert.runtime.engine.model_steps import ModelSteps, PromptChunk
from kvconvert.runtime.hf.generation import adopt

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CHUNK = 130


class Steps:
    """Two rows, and prompts before and after their first chunk."""

    def __init__(self, model):
        self.steps = ModelSteps(model, 4, None)
        self.ids = torch.tensor([5, 6, 0, 0], device=model.device)
        for row, length in enumerate((150, 9)):
            cache = self.steps.new_prompt()
            self.pass_over(False, [(row, cache, length, 0, True)])
            self.steps.join(row, cache)
        self.positions = torch.tensor([150, 9, 0, 0], device=model.device)
        self.later, self.first = self.steps.new_prompt(), self.steps.new_prompt()
        self.pass_over(False, [(2, self.later, CHUNK, 0, False)])
        self.parts = [(2, self.later, 70, CHUNK, True), (3, self.first, 33, 0, True)]

    def pass_over(self, decodes, parts):
        chunks = []
        for row, cache, count, position, last in parts:
            ids = random_ids(1, position + count, seed=row)[0, position:].tolist()
            chunks.append(PromptChunk(row, cache, ids, position, last))
        ids = self.ids, (self.positions if decodes else self.ids)
        logits, failures = self.steps.forward(*ids, decodes, chunks)
        assert not failures
        return logits.float()


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["oscar-g128", "kivi"])
def test_a_packed_pass_gives_the_logits_of_passes_of_their_own(device, scheme):
    model = tiny_model("llama", **SHAPE).to(device, torch.bfloat16)
    adopt(model, [KVScheme.preset(scheme).with_online_rotation()] * 2, {})
    together, apart = Steps(model), Steps(model)
    found = together.pass_over(True, together.parts)
    expected = apart.pass_over(True, [])
    for part in apart.parts:
        expected[part[0]] = apart.pass_over(False, [part])[part[0]]
    assert ((found - expected).norm(dim=1) < 2e-2 * expected.norm(dim=1)).all()
    for one, other in ((together.steps.cache, apart.steps.cache), (together.later, apart.later)):
        stats = one.stats()
        assert (stats.tokens, stats.pages, stats.fallbacks) == (other.stats().tokens, other.stats().pages, 0)
        assert stats.pages > 0


@pytest.mark.full
@pytest.mark.parametrize("count", [20, 40])  # pages are read as they are stored, or dequantized at first
def test_later_chunks_of_several_prompts_read_their_own_pages(device, count):
    # Differences of attention are seen in logits.
    model = tiny_model("llama", **SHAPE, gain=3.0).to(device, torch.bfloat16)
    adopt(model, [KVScheme.preset("oscar-g128").with_online_rotation()] * 2, {})
    found = []
    for packed in (True, False):
        some = Steps(model)
        # Caches that have held a prompt before know the shapes of their layers.
        lengths, caches = (270, 140), (some.later, some.first)
        for cache in caches:
            cache.reset()
            cache.begin_prompt()
        for row, cache, length in zip((2, 3), caches, lengths, strict=True):
            some.pass_over(False, [(row, cache, length, 0, False)])
        later = [(row, cache, count, length, True) for row, cache, length in zip((2, 3), caches, lengths, strict=True)]
        logits = [some.pass_over(False, parts) for parts in ([later] if packed else [[part] for part in later])]
        found.append(torch.stack([logits[0][2], logits[-1][3]]))
    assert ((found[0] - found[1]).norm(dim=1) < 2e-2 * found[1].norm(dim=1)).all()
