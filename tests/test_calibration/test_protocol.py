"""A projection finds its rows in a fused Linear, whatever the order of the blocks."""

import pytest
import torch
from tiny.models import ARCHITECTURES

from kvconvert.calibration.attention_sample import RECORDING_ATTENTION
from kvconvert.models.structure import LayerStructure, NormGroup, Projection

# Rows of a Linear with 2 query heads and 1 KV head of 2 channels, or of 2 heads with query, key and value each.
CASES = {
    "whole": (Projection("x"), list(range(8))),
    "blocks-query": (Projection("x", (2, 1, 1), 0), [0, 1, 2, 3]),
    "blocks-value": (Projection("x", (2, 1, 1), 2), [6, 7]),
    "halves": (Projection("x", (1, 1), 1), [4, 5, 6, 7]),
    "per-head-key": (Projection("x", (1, 1, 2), 1, 2), [1, 5]),
    "per-head-value": (Projection("x", (1, 1, 2), 2, 2), [2, 3, 6, 7]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_projection_reads_and_writes_exactly_its_rows(case):
    projection, expected = CASES[case]
    weight, bias = torch.arange(24.0).view(8, 3), torch.arange(8.0)
    assert torch.equal(projection.rows(weight), weight[expected])
    assert projection.rows(bias).tolist() == expected
    assert torch.equal(projection.rows(weight.T, dim=-1), weight.T[:, expected])
    changed = weight.clone()
    projection.write(changed, -projection.rows(weight))
    others = [row for row in range(8) if row not in expected]
    assert torch.equal(changed[expected], -weight[expected])
    assert torch.equal(changed[others], weight[others])


def test_what_stays_unquantized_is_named_but_not_among_the_linears():
    group = NormGroup("norm", ("router", "gate"), ("mlp",))
    structure = LayerStructure("attn", None, None, None, "out", (group,), (), 1, 1, 8, unquantized={"router": "small"})
    assert structure.named == ("out", "router", "gate")
    assert structure.linears == ("out", "gate")


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "llama"])
@torch.no_grad()
def test_calibration_computes_attention_with_sinks_and_soft_caps_as_the_model_does(name):
    model, inputs = ARCHITECTURES[name].build(), ARCHITECTURES[name].inputs()
    expected = model(**inputs).logits
    model.set_attn_implementation(RECORDING_ATTENTION)
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
