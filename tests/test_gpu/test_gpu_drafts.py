"""Steps that check drafts where kernels run: planned for all layers at once they give what they give layer by layer."""

import pytest
import torch
from test_gpu_packed import CASES, low_bit
from tiny.models import random_ids

from kvconvert.runtime.cache.steps import PlannedStep
from kvconvert.runtime.engine.model_steps import ModelSteps, PromptChunk

# Of every pass the tokens of a row, and how many each of the rows keeps. A page becomes complete on the way.
PASSES = ((4, (4, 1)), (9, (3, 9)), (1, (1, 1)), (2, (2, 1)))
LENGTHS = (121, 3)
ROWS = (0, 2)  # of four, of which the others are free


class Drafting:
    """Rows whose passes have several tokens.

    Args:
        model: of a bundle.
        planned: whether passes are planned for all layers.
    """

    def __init__(self, model, planned):
        self.model, self.planned, self.steps = model, planned, ModelSteps(model, 4, None)
        self.device, self.read = model.device, dict(zip(ROWS, LENGTHS, strict=True))
        none = torch.zeros(4, dtype=torch.int64, device=self.device)
        for row, length in self.read.items():
            prompt = self.steps.new_prompt()
            ids = random_ids(1, length, seed=row)[0].tolist()
            self.steps.forward(none, none, False, [PromptChunk(row, prompt, ids, 0, last=True)])
            self.steps.join(row, prompt)

    def logits(self):
        """After all tokens of all passes, as far as they were kept."""
        found = []
        for number, (count, kept) in enumerate(PASSES):
            ids = random_ids(4, count, seed=number).to(self.device)
            positions = torch.tensor([self.read.get(row, 0) for row in range(4)], device=self.device)
            positions = positions[:, None] + torch.arange(count, device=self.device)
            logits = self.check(ids, positions)
            counts = [1] * 4
            for row, own in zip(ROWS, kept, strict=True):
                found.append(logits[row, :own])
                counts[row] = own
                self.read[row] += own
            if count > 1:
                self.steps.keep(counts)
        return torch.cat(found).float()

    @torch.no_grad()
    def check(self, ids, positions):
        if not self.planned:
            with pytest.MonkeyPatch.context() as patch, self.model.prompts.layer_by_layer():
                patch.setattr(self.model.captured, "serves", lambda arguments: False)
                if ids.shape[1] > 1:
                    return self.steps.check(ids, positions)
                return self.steps.forward(ids[:, 0], positions[:, 0], True, [])[0][:, None]
        cache = self.steps.cache
        cache.hold_drafts(ids.shape[1])
        step = PlannedStep(cache.groups, tokens=ids.shape[1])
        with step.launches():
            # The model itself would plan a step of its own on a GPU.
            forward = self.model.captured.forward
            output = forward(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        step.finish()
        return output.logits


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_planned_drafts_give_the_logits_of_those_checked_layer_by_layer(device, name):
    model, *arguments = CASES[name]()
    model = low_bit(model, arguments[0], device, *arguments[1:])
    apart, together = Drafting(model, False), Drafting(model, True)
    expected, found = apart.logits(), together.logits()
    assert ((found - expected).norm(dim=1) < 3e-2 * expected.norm(dim=1)).all()
    one, other = together.steps.cache.stats(), apart.steps.cache.stats()
    assert one.fallbacks == 0
    assert (one.tokens, one.pages, one.bytes_used) == (other.tokens, other.pages, other.bytes_used)
