"""The plugin on a GPU: without vLLM every pass of a layer, and a recorded decoding step that is replayed.

What needs vLLM asks for it in this Python's environment, or for KVCONVERT_VLLM_PYTHON as `test_vllm/test_tokens.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from test_vllm.test_layer import DIM, PASSES, REQUESTS, SCHEMES, Layer
from test_vllm.test_tokens import PYTHON, bundle_of, in_vllm, prompts

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["kivi", "oscar", "calibrated"])
def test_prompts_attended_by_flash_attention_are_those_of_our_kernel(name, dtype):
    flash = pytest.importorskip("kvconvert.vllm.passes").flash_attention(dtype, DIM, DIM)
    if flash is None:
        pytest.skip("vLLM has no FlashAttention 3 for this GPU")
    worst = []
    for kernel in (None, flash):
        torch.manual_seed(0)
        layer = Layer(SCHEMES[name], kernels=True, device="cuda", dtype=dtype, flash=kernel)
        worst.append([layer.run(lengths) for lengths in [*PASSES, [1, 90, 200], [200, 1, 3]]])
    assert max(worst[1]) < max(worst[0]) + 0.02


@pytest.mark.skipif(not PYTHON, reason="KVCONVERT_VLLM_PYTHON names no Python with vLLM and kvconvert")
def test_a_prefix_from_the_cache_gives_what_reading_it_gives(tmp_path, monkeypatch):
    """Prompts in chunks of a page, so that a prompt read anew and one whose prefix is found have the same passes."""
    (info := tmp_path / "plugin" / "kvconvert_tested-0.dist-info").mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvconvert-tested\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nkvconvert = kvconvert.vllm.plugin:register\n")
    path = [str(info.parent), str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    bundle, asked = bundle_of(tmp_path, ""), prompts(400, 256, 700)
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 1, "enable_chunked_prefill": True}
    options |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 28}
    said = in_vllm(bundle, [[prompt] for prompt in (*asked, *asked)], 40, enable_prefix_caching=True, **options)
    assert len(said) == 2, said
    found, counted = said
    assert counted["hits"] == 384 + 128 + 640
    assert found[:3] == found[3:]
