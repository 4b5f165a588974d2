"""The plugin's layers on a GPU, without vLLM: every pass, and a recorded decoding step that is replayed."""

from __future__ import annotations

import pytest
import torch
from test_vllm.test_layer import PASSES, REQUESTS, SCHEMES, Layer

from kvconvert.vllm.step import StepPlan

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)


class Recorded(Layer):
    """Passes of single tokens are replayed from one recording, with tokens in fixed places."""

    graph: torch.cuda.CUDAGraph | None = None

    def attend(self, plan: StepPlan, *tokens: torch.Tensor) -> torch.Tensor:
        if len(plan.decodes) < REQUESTS:
            return super().attend(plan, *tokens)
        if self.graph is None:
            self.inputs = [x.to(self.device) for x in tokens]
            super().attend(plan, *self.inputs)  # compiles, and makes what stays
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.output = super().attend(plan, *self.inputs)
        for place, x in zip(self.inputs, tokens, strict=True):
            place.copy_(x)
        self.graph.replay()
        return self.output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_attends_to_what_is_stored_as_it_is_stored(name, recorded, dtype):
    torch.manual_seed(0)
    layer = (Recorded if recorded else Layer)(SCHEMES[name], kernels=True, device="cuda", dtype=dtype)
    # Attention over 2-bit pages of random numbers; a key that is rounded to another code is what bfloat16 does, and now
    # and then another order of sums.
    bound = 4e-3 if dtype == torch.float32 else 0.3
    worst = [layer.run(lengths) for lengths in PASSES + [[1, 1, 1]] * 140]
    assert max(worst) < (0.1 if dtype == torch.float32 else bound)
    assert sorted(worst)[len(worst) // 2] < bound / 7
