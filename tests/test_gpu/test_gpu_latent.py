"""Caches of latents (MLA) where kernels run: these write the pages of small latents, and no kernel attends to them."""

import pytest
import torch
from tiny.models import ARCHITECTURES, random_ids

from kvconvert import KVCache
from kvconvert.methods import KVScheme


def read(model, ids, cache):
    """Logits of a prompt of 260 tokens, of which two pages are written, and of three tokens after it, one by one."""
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([260, 1, 1, 1], 1)]
    return torch.cat(parts, 1).float().cpu()


# At 512 channels, as in DeepSeek's models, latents are wider than the kernels of pages take.
@pytest.mark.parametrize("rank", [32, pytest.param(512, marks=pytest.mark.full)])
@pytest.mark.parametrize("preset", ["latent-4bit", "latent-2bit"])
def test_a_gpu_reads_latents_as_a_cpu_does(device, preset, rank):
    model, ids = ARCHITECTURES["deepseek_v3"].build("kvconvert", kv_lora_rank=rank), random_ids(2, 263)
    scheme = KVScheme.preset(preset)
    cache = KVCache(model.config, scheme)
    found = read(model.to(device), ids.to(device), cache)
    model = model.cpu()
    if device.type == "cpu":
        from kvconvert.kernels.device import interpreted

        with interpreted(False):
            expected = read(model, ids, KVCache(model.config, scheme))
    else:
        expected = read(model, ids, KVCache(model.config, scheme))
    stats = cache.stats()
    # Two pages in each of two rows and layers; three steps of two layers without a kernel, and pages of wide latents.
    assert (stats.pages, stats.fallbacks >= 6) == (8, True)
    # float32 sums in another order may round a code otherwise.
    assert (found - expected).abs().mean() < 2e-3 * expected.std()
