"""Prompts whose tokens see later ones, as token types say, are read by each attention as by the eager one."""

import pytest
import torch
from tiny.models import ARCHITECTURES, random_ids

from kvconvert import KVCache, KVScheme
from kvconvert.calibration.attention_sample import RECORDING_ATTENTION
from kvconvert.calibration.simulated_attention import SIMULATED_ATTENTION

UNQUANTIZED = KVScheme(key_bits=16, value_bits=16)
PROMPT, FURTHER, PREFIX = 40, 3, 25
GEMMA2 = {"model_type": "gemma2", "sliding_window": 16}
# Tokens of type 0 are PaliGemma's prefix; those of type 1 are Gemma 3's image.
MODELS = {"paligemma": ("paligemma", {}), "paligemma2": ("paligemma", GEMMA2), "gemma3": ("gemma3", {})}
WHOLE = [1] * PROMPT
TYPES = {"none": None, "all 0": [0] * PROMPT, "0, then 1": [0] * PREFIX + WHOLE[PREFIX:], "all 1": WHOLE}


def read(model, ids, types, cache):
    """Logits of a prompt and of further tokens, one by one."""
    kinds = {} if types is None else {"token_type_ids": torch.tensor([types])}
    found = [model(input_ids=ids[:, :PROMPT], past_key_values=cache, use_cache=True, **kinds)]
    for end in range(PROMPT, PROMPT + FURTHER):
        found.append(model(input_ids=ids[:, end : end + 1], past_key_values=found[0].past_key_values))
    return torch.cat([output.logits for output in found], 1)


@pytest.mark.each_value
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_prompt_sees_what_its_token_types_let_it_see(name, types):
    tiny, text = ARCHITECTURES[MODELS[name][0]], MODELS[name][1]
    ids = random_ids(1, PROMPT + FURTHER)
    expected = read(tiny.build("eager", **text), ids, types, None)
    model = tiny.build("kvconvert", **text)
    found = read(model, ids, types, KVCache(model.config, UNQUANTIZED))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    for attention in ("kvconvert", RECORDING_ATTENTION, SIMULATED_ATTENTION):
        kinds = {} if types is None else {"token_type_ids": torch.tensor([types])}
        alone = tiny.build(attention, **text)(input_ids=ids[:, :PROMPT], use_cache=False, **kinds).logits
        torch.testing.assert_close(alone, expected[:, :PROMPT], atol=2e-3, rtol=2e-3)
