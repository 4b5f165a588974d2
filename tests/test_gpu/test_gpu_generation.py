"""On the reference model, the kernels choose the tokens that the reference path chooses."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.kernels.device import interpreted
from kvconvert.runtime.hf.cache import KVCache

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "reference-lm"
TEXT = ROOT / "kvconvert" / "data" / "texts" / "books-val.txt"
# Two logits this near each other may change places by rounding; logits of the reference model span about 20.
TIE = 0.02


def logits_of_steps(model, ids: torch.Tensor, prompt: int, scheme: str) -> torch.Tensor:
    """Logits [steps, vocabulary] of a prompt's last token and of every token after it, one step at a time."""
    cache = KVCache(model.config, scheme)
    found = []
    with torch.inference_mode():
        for part in (ids[:, :prompt], *ids[:, prompt:].split(1, 1)):
            found.append(model(part, past_key_values=cache, use_cache=True).logits[0, -1].float().cpu())
    return torch.stack(found)


def agree(scheme: str, prompt: int, steps: int, device: torch.device, **shape: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = TEXT.read_text(encoding="utf8")[: 8 * (prompt + steps)]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : prompt + steps]
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="kvconvert", **shape
    ).eval()
    if device.type == "cpu":
        kernels = logits_of_steps(model, ids, prompt, scheme)
        with interpreted(False):
            reference = logits_of_steps(model, ids, prompt, scheme)
    else:
        reference = logits_of_steps(model, ids, prompt, scheme)
        kernels = logits_of_steps(model.to(device), ids.to(device), prompt, scheme)
    best = reference.topk(2, -1).values
    settled = best[:, 0] - best[:, 1] > TIE
    assert settled.float().mean() > 0.9
    assert torch.equal(kernels.argmax(-1)[settled], reference.argmax(-1)[settled])


@pytest.mark.parametrize("scheme", ["oscar-g128"])
def test_the_kernels_choose_the_reference_paths_tokens(scheme, device):
    if device.type == "cuda":
        agree(scheme, 300, 512, device)
    else:
        # The model's first layer alone: the interpreter takes its time.
        agree(scheme, 132, 2, device, num_hidden_layers=1)


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["oscar", "kitty", "kivi", "calibquant-1bit", "calibquant-2bit", "minikv"])
def test_every_method_chooses_the_reference_paths_tokens(scheme, device):
    steps = 6 if device.type == "cpu" else 512
    agree(scheme, 300, steps, device)
