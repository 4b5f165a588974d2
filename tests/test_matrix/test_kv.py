"""Every architecture's cache against an independent reference, in left-padded batches."""

import pytest
import torch
from facts import LIMITS
from kv_cells import RECIPES, REFUSED, kv_cell
from tiny.models import ARCHITECTURES, architectures, representatives

from kvconvert.errors import UnsupportedModelError
from kvconvert.runtime import KVCache

KEPT = [name for name in ARCHITECTURES if name not in REFUSED]
LOW_BIT = [name for name in RECIPES if name != "exact"]


def low_bit_cells():
    """Each architecture with each recipe; `make test` takes one recipe of each representative, in turn, and chunks of
    attention from which tokens are evicted.
    """
    few = representatives(KEPT)
    small = {(name, i % len(LOW_BIT)) for i, name in enumerate(few)} | {("llama4_text", LOW_BIT.index("minikv"))}
    return [
        pytest.param(name, recipe, marks=() if (name, j) in small else pytest.mark.full, id=f"{name}-{recipe}")
        for name in KEPT
        for j, recipe in enumerate(LOW_BIT)
    ]


@pytest.mark.quick("gemma4_text_shared", "gpt_oss", "llama4_text", "opt", "qwen3_next", "qwen2_5_omni_thinker")
@pytest.mark.parametrize("name", architectures(KEPT))
def test_unquantized_pages_give_what_transformers_gives(name):
    cell = kv_cell(ARCHITECTURES[name], RECIPES["exact"])
    # float32 sums in another order; logits have a standard deviation of 0.3 to 5
    torch.testing.assert_close(cell.cache, cell.full, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(cell.alone, cell.full[:1], rtol=1e-3, atol=1e-3)
    assert cell.pages > 0


@pytest.mark.quick(
    "gemma4_text_shared-oscar", "olmo2-kitty", "gpt_oss-minikv", "llama4_text", "opt-calibquant", "qwen3_next-kivi"
)
@pytest.mark.parametrize(("name", "recipe"), low_bit_cells())
def test_low_bit_pages_and_spans_give_what_the_reference_gives(name, recipe):
    cell = kv_cell(ARCHITECTURES[name], RECIPES[recipe])
    # Shares of what compression changes. A code at the edge between two may fall to either side: one among some
    # thousands, 0.002 at most where it was seen. A wrong group, page or window makes 0.1 and more.
    assert cell.error < LIMITS["error"]
    assert cell.padding_error < LIMITS["padding_error"]
    # ... which is not nothing
    assert cell.effect > 0.01
    assert cell.spans > 0 if recipe == "calibquant" else cell.pages > 0
    assert (cell.evicted > 0) == (recipe == "minikv")


@pytest.mark.parametrize("name", REFUSED)
def test_a_cache_that_a_model_cannot_have_is_refused_by_name(name):
    config = ARCHITECTURES[name].config()
    with pytest.raises(UnsupportedModelError, match=rf"No layer of this {config.model_type} model.*{REFUSED[name]}"):
        KVCache(config, "kivi")
