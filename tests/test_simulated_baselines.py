"""What the simulated baselines do to keys and values."""

import real_model_docs
import simulated_baselines
import simulated_feedback
import simulated_methods as simulated
import torch

GENERATOR = torch.Generator().manual_seed(0)


def layer(tokens=300, heads=2, size=16):
    x = [torch.randn(n, tokens, size, generator=GENERATOR) for n in (2 * heads, heads, heads)]
    found = simulated.Layer(*x)
    (found.known,) = simulated_baselines.calibrated([found])
    return found


def test_levels_are_those_of_lloyd_and_max():
    expected = torch.tensor([-1.5104, -0.4528, 0.4528, 1.5104])
    torch.testing.assert_close(simulated.gaussian_levels(2), expected, atol=2e-3, rtol=0)
    torch.testing.assert_close(simulated.gaussian_levels(1), torch.tensor([-0.7979, 0.7979]), atol=2e-3, rtol=0)


def test_every_method_keeps_sink_tokens_and_the_newest_exact_and_changes_the_rest():
    given = layer()
    for name, method in simulated.METHODS.items():
        found = method(given)
        for side in ("keys", "values"):
            read, exact = getattr(found, side), getattr(given, side)
            torch.testing.assert_close(read[:, :4], exact[:, :4], msg=name)
            torch.testing.assert_close(read[:, -1], exact[:, -1], msg=name)
        assert 0 < found.bits < 16, name
        assert found.keys.shape[1] < 300 or not torch.equal(found.keys, given.keys) or "values as" in name


def test_the_calibrated_rotation_makes_every_stored_channel_matter_alike():
    known = layer().known
    turn = simulated_feedback.rotation(known, calibrated=True).double()
    torch.testing.assert_close(turn.mT @ turn, torch.eye(16).double().expand_as(turn), atol=1e-5, rtol=0)
    diagonal = (turn.mT @ known.moments @ turn).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(diagonal, diagonal.mean(1, keepdim=True).expand_as(diagonal), atol=0, rtol=1e-4)


def test_error_feedback_lowers_the_expected_error_of_scores_in_either_rotation():
    given = layer()
    # Queries that look mostly along one direction, as real ones do.
    given.queries += 3 * torch.randn(1, 16, generator=GENERATOR) * torch.randn(300, 1, generator=GENERATOR)
    (known,) = simulated_baselines.calibrated([given])
    for calibrated in (False, True):
        error = []
        for feedback in (False, True):
            off = (known.keys - simulated_feedback.rounded_keys(known.keys, known, 2, calibrated, feedback)).double()
            error.append(float(((off @ known.moments) * off).sum()))
        assert error[1] < 0.9 * error[0]


def test_boosted_channels_come_in_whole_pairs_or_bands():
    given = layer()
    plain = simulated.pages(given, simulated.per_channel, simulated.exact).keys
    for block, shape in {"channel": (1, 16, 1), "pair": (2, 8, 1), "band": (2, 2, 4)}.items():
        found = simulated.boosted(given, simulated.exact, 0.5, block).keys
        changed = (found != plain).any(1)
        assert changed.sum(1).tolist() == [8, 8]
        blocks = changed.unflatten(1, shape)
        assert torch.equal(blocks.all(3).all(1), blocks.any(3).any(1)), block


def test_eviction_keeps_what_the_counted_queries_attend_to():
    given = layer()
    # The newest queries look at token 40 alone, the others at token 100.
    given.keys[:, 40], given.keys[:, 100] = 0, 0
    given.keys[:, 40, 0], given.keys[:, 100, 1] = 50, 50
    given.queries[:, :, :2] = 0
    given.queries[:, :-32, 1], given.queries[:, -32:, 0] = 50, 50
    held = {}
    for queries in (32, None):
        found = simulated.evicted(given, 0.1, queries).values
        held[queries] = (found[0][:, None] == given.values[0][None]).all(2).any(0)
    assert held[32][40]
    assert held[None][100]
    assert not held[32][100]


def test_rows_are_shown_by_bits():
    rows = {
        "large": {"bits": 4.0, "kl": 0.1, "perplexity": 20.0},
        "small": {"bits": 2.0, "kl": 0.5, "perplexity": 25.0},
    }
    about = {"prompts": 2, "length": 8, "scored": 4, "text": "novels.txt", "source_perplexity": 19.0}
    text = real_model_docs.simulated({"rows": rows, **about})
    assert text.endswith("| small | 2.00 | 0.5000 | 25.00 |\n| large | 4.00 | 0.1000 | 20.00 |")
