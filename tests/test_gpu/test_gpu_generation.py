"""On the reference model, the kernels choose the tokens that the reference path chooses."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny.models import random_ids, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert import KVCache, KVScheme
from kvconvert.kernels.device import interpreted
from kvconvert.runtime import seal_prompt
from kvconvert.runtime.cache import attend
from kvconvert.runtime.hf.layer import PagedLayer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "reference-lm"
TEXT = ROOT / "kvconvert" / "data" / "texts" / "books-val.txt"
# Two logits this near each other may change places by rounding; logits of the reference model span about 20.
TIE = 0.02
# Relative noise of keys and values that stands for products added up in another order. A value that it moves over the
# border between two codes changes all later logits: with kivi 1e-5 moves them by 0.015 in the median step, by 1.1 in
# the worst of 512, and exchanges two tokens that are 0.06 apart.
NOISE = 1e-5


def logits_of_steps(model, ids: torch.Tensor, prompt: int, scheme: str | KVScheme) -> torch.Tensor:
    """Logits [steps, vocabulary] of a prompt's last token and of every token after it, one step at a time."""
    cache = KVCache(model.config, scheme)
    found = []
    with torch.inference_mode():
        for part in (ids[:, :prompt], *ids[:, prompt:].split(1, 1)):
            found.append(model(part, past_key_values=cache, use_cache=True).logits[0, -1].float().cpu())
            if len(found) == 1:
                seal_prompt(model, cache, part)
    return torch.stack(found)


@contextmanager
def noisy_tokens():
    """Within the context caches are given keys and values with noise."""
    update, generator = PagedLayer.update, torch.Generator().manual_seed(0)

    def noisy(self, keys, values, *args, **kwargs):
        keys, values = (x * (1 + NOISE * torch.randn(x.shape, generator=generator)) for x in (keys, values))
        return update(self, keys, values, *args, **kwargs)

    PagedLayer.update = noisy
    try:
        yield
    finally:
        PagedLayer.update = update


def agree(scheme: str | KVScheme, prompt: int, steps: int, device: torch.device, **shape: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = TEXT.read_text(encoding="utf8")[: 8 * (prompt + steps)]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : prompt + steps]
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="kvconvert", **shape
    ).eval()
    with interpreted(False):
        reference = logits_of_steps(model, ids, prompt, scheme)
        with noisy_tokens():
            noise = (logits_of_steps(model, ids, prompt, scheme) - reference).abs().amax(-1)
    kernels = logits_of_steps(model.to(device), ids.to(device), prompt, scheme)
    error = (kernels - reference).abs().amax(-1)
    assert error.median() < max(TIE, 4 * noise.median())
    best = reference.topk(2, -1).values
    margin = best[:, 0] - best[:, 1]
    assert (margin > TIE).float().mean() > 0.9
    parted = (kernels.argmax(-1) != reference.argmax(-1)) & (margin > TIE)
    assert parted.float().mean() < 0.01
    assert (margin[parted] < 2 * noise.max()).all(), f"margins {margin[parted]}, errors {error[parted]}"


# Under the interpreter tests of the cache and of packed prompts compare the same kernels in less time.
ON_A_GPU = () if torch.cuda.is_available() else pytest.mark.full


@pytest.mark.parametrize("scheme", [pytest.param("oscar-g128", marks=ON_A_GPU)])
def test_the_kernels_choose_the_reference_paths_tokens(scheme, device):
    if device.type == "cuda":
        agree(scheme, 300, 512, device)
    else:
        # The model's first layer alone: the interpreter takes its time.
        agree(scheme, 132, 2, device, num_hidden_layers=1)


@pytest.mark.full
def test_heads_that_keep_different_numbers_of_tokens_choose_the_reference_paths_tokens(device):
    scheme = KVScheme(
        key_group_size=128,
        value_group_size=128,
        sink_tokens=4,
        rotate_keys="hadamard",
        rotate_values="online",
        token_norm="per_head",
        heavy_ratio=0.5,
        recent_ratio=0.02,
        selection="reconstruction",
    )
    if device.type == "cuda":
        agree(scheme, 900, 300, device)
    else:
        agree(scheme, 270, 2, device, num_hidden_layers=1)


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["oscar", "kitty", "kivi", "calibquant-1bit", "calibquant-2bit", "minikv"])
def test_every_method_chooses_the_reference_paths_tokens(scheme, device):
    steps = 6 if device.type == "cpu" else 512
    agree(scheme, 300, steps, device)


def windowed_model():
    shape = {"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    return tiny_model("mistral", "kvconvert", num_hidden_layers=2, sliding_window=50, **shape)


def test_tables_of_a_first_prompt_describe_what_each_layer_stores_when_it_attends(device, monkeypatch):
    # All layers before the last are compressed by then, but the last is not: no page is its own yet.
    found = []

    def describe(queries, stored, *args, **kwargs):
        tables, line = stored._tables()
        found.append((tables.plans[0].residual >= 140, tables.described[line, 0, 7].item()))
        return torch.zeros_like(queries)

    monkeypatch.setattr(attend, "decode_attention", describe)
    model = windowed_model().to(device)
    with torch.no_grad():
        model(random_ids(1, 140).to(device), past_key_values=KVCache(model.config, "oscar-g128"))
    assert found == [(True, 140)] * 2


@pytest.mark.full
def test_a_first_prompt_under_a_sliding_window_gives_the_reference_paths_logits(device):
    model, ids = windowed_model(), random_ids(2, 140)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0

    def logits() -> torch.Tensor:
        cache, on = KVCache(model.config, "oscar-g128"), model.device
        with torch.no_grad():
            return model(ids.to(on), attention_mask=mask.to(on), past_key_values=cache).logits[:, -1].cpu()

    with interpreted(False):
        expected = logits()
    model.to(device)
    torch.testing.assert_close(logits(), expected, atol=1e-3, rtol=1e-3)
