"""The scores that kernels predict are the network's, and the tokens that they keep are those that were chosen."""

import pytest
import torch
from tiny.models import random_ids, tiny_model
from tiny.scorers import predicting, scorer_plan

from kvconvert import KVCache
from kvconvert.kernels.device import interpreted
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.kernels.select import TokenScorer, keep_tokens, predicted_scores
from kvconvert.methods.kvzip import SCORE_QUANTILES, SCORER_CHANNELS, scorer_shapes
from kvconvert.runtime.cache.compress import seal

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def network(heads, dim, value_dim, scale=0.05, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = list(scorer_shapes(heads, dim, value_dim).values())
    assert shapes[0][0] == SCORER_CHANNELS
    assert shapes[-1] == (heads, SCORE_QUANTILES)
    return TokenScorer(*(scale * torch.randn(shape, generator=generator) for shape in shapes[:-1]))


def tokens(heads, count, dim, dtype, seed):
    """[count, dim] of each head, each in memory of its own."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count + 3, dim, generator=generator).to(dtype)[:count] for _ in range(heads)]


# Heads, tokens, channels of keys and of values.
SHAPES = [
    (1, 64, 64, 64),
    (2, 131, 16, 40),
    (3, 200, 128, 128),
    pytest.param(8, 70, 96, 80, marks=pytest.mark.full),
    pytest.param(2, 300, 256, 256, marks=pytest.mark.full),
]


@pytest.mark.each_value
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "count", "dim", "value_dim"), SHAPES)
def test_scores_are_those_of_the_network(device, dtype, rotated, heads, count, dim, value_dim):
    scorer = network(heads, dim, value_dim)
    keys, values = tokens(heads, count, dim, dtype, 1), tokens(heads, count, value_dim, dtype, 2)
    plain = torch.stack(keys).float()
    plain = hadamard_transform(plain, inverse=True) if rotated else plain
    expected = scorer.scores(plain, torch.stack(values))
    on_device = [[part.to(device) for part in parts] for parts in (keys, values)]
    found = predicted_scores(TokenScorer(*(t.to(device) for t in scorer)), *on_device, rotated, 4, 9).cpu()
    assert found[:, :4].isinf().all()
    assert found[:, -9:].isinf().all()
    torch.testing.assert_close(found[:, 4:-9].log(), expected[:, 4:-9].log(), atol=0.02, rtol=0.01)


def test_scores_that_are_no_numbers_stay_so_where_tokens_have_to_be_kept(device):
    scorer = network(2, 16, 16)._replace(bias=torch.tensor([torch.nan, 1e30]))
    keys, values = (tokens(2, 70, 16, torch.float32, seed) for seed in (1, 2))
    on_device = [[part.to(device) for part in parts] for parts in (keys, values)]
    found = predicted_scores(TokenScorer(*(t.to(device) for t in scorer)), *on_device, False, 4, 9).cpu()
    assert found[0].isnan().all()
    assert found[1, 4:-9].log().tolist() == pytest.approx([80.0] * 57)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "count", "dim", "value_dim"), SHAPES)
def test_chosen_tokens_are_copied(device, dtype, heads, count, dim, value_dim):
    sides = [tokens(heads, count, size, dtype, seed) for seed, size in enumerate((dim, value_dim))]
    counts = [count // (head + 2) for head in range(heads)]
    index = torch.stack(
        [torch.randperm(count, generator=torch.Generator().manual_seed(head))[: max(counts)] for head in range(heads)]
    )
    on_device = [[part.to(device) for part in parts] for parts in sides]
    targets = [
        [torch.full((own + 2, size), 7.0, dtype=dtype, device=device) for own in counts] for size in (dim, value_dim)
    ]
    keep_tokens(
        tuple(on_device),
        tuple([target[:own] for target, own in zip(side, counts, strict=True)] for side in targets),
        index.to(device),
    )
    for side, found in zip(sides, targets, strict=True):
        for head, (own, target) in enumerate(zip(counts, found, strict=True)):
            assert torch.equal(target[:own].cpu(), side[head][index[head, :own]])
            assert (target[own:] == 7.0).all()


@torch.no_grad()
def test_layers_that_keep_different_tokens_are_sealed_together(device):
    """As one by one, and with the tokens that are kept without the kernels."""
    scheme, plan = predicting(), scorer_plan(2, 2, 16)
    kept, logits = [], []
    for place, together in ((device, True), (device, False), (torch.device("cpu"), True)):
        model = tiny_model("llama", "kvconvert", num_hidden_layers=2, gain=8.0).to(place)
        cache = KVCache(model.config, scheme, plan=plan)
        with interpreted(place is device and device.type == "cpu"):
            cache.begin_prompt()
            model(random_ids(2, 500).to(place), past_key_values=cache)
            for group in [] if together else cache.groups:
                seal(group)
            cache.seal()
            logits.append(model(random_ids(2, 1).to(place), past_key_values=cache).logits.cpu())
        kept.append([row.kept.cpu() for store in cache.stores() for row in store.rows])
    assert torch.equal(logits[0], logits[1])
    assert len({part.shape for part in kept[0]}) > 1
    for found, alone, expected in zip(*kept, strict=True):
        assert torch.equal(found, alone)
        assert found.shape == expected.shape
        # Repeated tokens have equal scores.
        assert len({*found[0].tolist()} & {*expected[0].tolist()}) >= found.shape[1] - 2
