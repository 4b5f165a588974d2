"""Caches of latents (MLA) where kernels run: pages are written, and decoding attends to them, as on a CPU."""

import pytest
import torch
from tiny.models import ARCHITECTURES, GREEDY, random_ids

from kvconvert import KVCache, KVScheme
from kvconvert.kernels.launches import record_specializations
from kvconvert.runtime.hf.generation import adopt
from kvconvert.runtime.hf.rehearsal import rehearse


def read(model, ids, cache):
    """Logits of a prompt of 140 tokens, of which a page is written, and of two tokens after it, one by one."""
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([140, 1, 1], 1)]
    return torch.cat(parts, 1).float().cpu()


def read_on_a_cpu(model, ids, scheme, device):
    """The same where no kernels run."""
    if device.type != "cpu":
        return read(model.cpu(), ids, KVCache(model.config, scheme))
    from kvconvert.kernels.device import interpreted

    with interpreted(False):
        return read(model, ids, KVCache(model.config, scheme))


# There is no kernel for float32: both steps fall back.
@pytest.mark.parametrize(
    ("dtype", "fallbacks", "most"),
    [(torch.float16, 0, 1e-2), pytest.param(torch.float32, 2, 2e-3, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("preset", [pytest.param("latent-4bit", marks=pytest.mark.full), "latent-2bit"])
def test_a_gpu_reads_latents_as_a_cpu_does(device, preset, dtype, fallbacks, most):
    # Without experts, which rounding would choose otherwise.
    model = ARCHITECTURES["deepseek_v3"].build("kvconvert", first_k_dense_replace=1, num_hidden_layers=1).to(dtype)
    ids, scheme = random_ids(2, 142), KVScheme.preset(preset)
    cache = KVCache(model.config, scheme)
    found = read(model.to(device), ids.to(device), cache)
    expected = read_on_a_cpu(model, ids, scheme, device)
    stats = cache.stats()
    # A page in each of two rows.
    assert (stats.pages, stats.fallbacks) == (2, fallbacks)
    # Sums in another order may round a code otherwise.
    assert (found - expected).abs().mean() < most * expected.std()


def test_windows_that_differ_fall_back_with_the_reason(device, caplog):
    model, ids = ARCHITECTURES["deepseek_v3"].build("kvconvert"), random_ids(1, 142)
    scheme = KVScheme(key_bits=4, value_bits=8, key_group_size=128, value_group_size=16, value_recent_tokens=128)
    cache = KVCache(model.config, scheme)
    found = read(model.to(device), ids.to(device), cache)
    assert (found - read_on_a_cpu(model, ids, scheme, device)).abs().mean() < 2e-3 * found.std()
    assert cache.stats().fallbacks == 4
    assert "for different numbers of tokens" in caplog.text


def test_generate_reads_prompts_as_the_model_does_and_decodes_by_kernels(device):
    # Without experts, of which PyTorch's own code would be compared as well.
    model = ARCHITECTURES["deepseek_v3"].build("kvconvert", first_k_dense_replace=2).requires_grad_(False)
    model = model.to(device, torch.bfloat16)
    adopt(model, [KVScheme.preset("latent-4bit")] * 2, {})
    ids = random_ids(1, 140).to(device)
    arguments = {"max_new_tokens": 3, "disable_compile": True, **GREEDY}
    first = model.generate(ids, **arguments)
    # Of a second prompt the shape is known, so that others would be packed.
    cache = model.new_kv_cache()
    assert torch.equal(model.generate(ids, past_key_values=cache, **arguments), first)
    assert (model.prompts.packed, cache.stats().fallbacks, cache.stats().pages) == (0, 0, 2)


@pytest.mark.full
def test_generate_launches_what_was_rehearsed(device):
    model = ARCHITECTURES["deepseek_v3"].build("kvconvert", first_k_dense_replace=2).requires_grad_(False)
    model = model.to(device, torch.bfloat16)
    adopt(model, [KVScheme.preset("latent-2bit")] * 2, {})
    with record_specializations() as listed:
        rehearse(model)
    with record_specializations(makes=True) as launched:
        model.generate(random_ids(2, 140).to(device), max_new_tokens=3, **GREEDY)
    assert any(launch.name == "latent_decode_kernel" for launch in launched)
    assert not [launch for launch in launched if launch not in listed]
