"""The treatment of keys that is chosen is the one that suits how the keys were made."""

from dataclasses import replace

import pytest
import torch
from sample_layers import cache_format, layer_work, random_sample, run_passes

from kvconvert.cache import LayerCache, layer_format
from kvconvert.calibration.attention_sample import AttentionSampler
from kvconvert.calibration.keys import (
    ConstantPart,
    ErrorFeedbackPass,
    KeyTreatmentPass,
    Rope,
    TreatmentSearch,
    measure_constant_part,
)
from kvconvert.calibration.scales import ClipRatioPass, stored_tokens
from kvconvert.errors import UnsupportedModelError
from kvconvert.kernels.pages import SideTensors, key_center, page_centers
from kvconvert.methods import KVCalibration, KVScheme, preset_calibration
from kvconvert.methods.keys import treatments

DIM, TOKENS = 16, 520
SEARCH = preset_calibration("default")


def rope(dim=DIM):
    count = dim // 2
    frequencies = 10000.0 ** (-torch.arange(count) / count)
    pairs = torch.arange(dim).view(2, count).T
    return Rope(frequencies, pairs, 1.0)


def turned(keys):
    """Keys [n, H, T, D] with RoPE."""
    r = rope(keys.shape[-1])
    angle = torch.arange(keys.shape[2])[:, None] * r.frequencies
    a, b = keys.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def best(sample, scheme, constant):
    search = TreatmentSearch(sample, False, constant, SEARCH)
    return search.best(scheme, treatments(scheme, DIM))


def scheme(**fields):
    return KVScheme(key_group_size=128, sink_tokens=4, **fields)


def sample_with(keys, loud=2.0):
    """Keys in the place of a sample's own; the size of queries says how sharply attention chooses between them."""
    plain = random_sample(tokens=TOKENS, dim=DIM, sequences=4)
    return replace(plain, keys=keys, queries=loud * plain.queries)


def normal(seed=1):
    return torch.randn(4, 2, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))


def test_a_large_constant_under_rope_is_kept_apart():
    mean = 6 * torch.randn(2, DIM, generator=torch.Generator().manual_seed(3))
    keys = turned(mean[None, :, None] + normal())
    embeddings = (rope().frequencies * torch.arange(TOKENS)[:, None])[None].repeat(1, 1, 2)
    constant = measure_constant_part(keys, (embeddings.cos(), embeddings.sin()), 4, None)
    assert float(constant.share.min()) > 0.8
    chosen, errors = best(sample_with(keys), scheme(key_bits=2), constant)
    assert chosen.centers
    assert errors[chosen.name] < 0.3 * min(e for name, e in errors.items() if not name.startswith("centered"))


def test_tokens_of_very_different_size_get_norms():
    sizes = torch.where(torch.arange(TOKENS) % 16 == 5, 12.0, 1.0)
    keys = normal() * sizes[:, None]
    chosen, _ = best(sample_with(keys, 0.05), scheme(key_bits=2), "no RoPE")
    assert chosen.fields["token_norm"] == "joint"


def test_wide_channels_among_narrow_ones_are_boosted():
    keys = normal() * torch.where(torch.arange(DIM) < 8, 8.0, 0.02)
    chosen, _ = best(sample_with(keys, 0.2), scheme(key_bits=3), "no RoPE")
    assert chosen.name == "boosted"
    assert (chosen.over(scheme(key_bits=3)).key_bits, chosen.fields["boost_fraction"]) == (2, 0.5)


def test_without_a_constant_no_centered_treatment_is_tried():
    _, errors = best(sample_with(normal()), scheme(key_bits=2), "no RoPE")
    assert errors
    assert not any(name.startswith("centered") for name in errors)


@pytest.mark.parametrize(("bits_of_keys", "group"), [(3, 128), (2, 128), (2, 64), (2, 32), (1, 128), (4, 32)])
def test_treatments_take_no_more_bits_than_the_scheme_and_a_norm(bits_of_keys, group):
    def bits(scheme):
        return LayerCache(4, 128, 128, scheme).one_page_bytes * 8 / 128

    own = KVScheme(key_bits=bits_of_keys, key_group_size=group)
    allowed = bits(own) + 16 + 4 * 128 * 0.05
    found = treatments(own, 128)
    assert len({treatment.name for treatment in found}) == len(found) >= 8
    assert all(bits(treatment.over(own).uncalibrated()) <= allowed for treatment in found)


def test_keys_stored_without_their_constant_come_back_with_it():
    mean = torch.randn(2, DIM, generator=torch.Generator().manual_seed(5)) * 50
    keys = turned(mean[None, :, None] + normal())[0]
    cache = cache_format(dim=DIM, group=128, sink_tokens=4)
    center = key_center(mean, rope().frequencies, rope().pairs, False)
    centered = replace(cache, key_tensors=SideTensors(center=center))
    read, whole = (stored_tokens(keys[None], own, "key", [1.0])[0, 0] for own in (centered, cache))
    pages = slice(4, 4 + 4 * 128)
    assert torch.equal(read[:, :4], keys[:, :4])
    assert torch.equal(read[:, 516:], keys[:, 516:])
    error, plain = ((x - keys)[:, pages].square().mean() for x in (read, whole))
    assert error < 0.01 * plain
    starts = torch.tensor([4])
    rest = keys[:, 4:132] - page_centers(starts, 128, center)[0]
    assert float(rest.abs().max()) < 6  # unit normals and the rounding of the matrix


def run_pass(scheme, search, changing_rope=None, tokens=300):
    work, _ = layer_work(samples=2, length=tokens)
    shape = work.structure
    work.cache = layer_format(scheme.uncalibrated(), heads=shape.num_key_value_heads, key_dim=shape.head_dim)
    work.changing_rope = changing_rope
    sampler = AttentionSampler(2)
    chosen = KeyTreatmentPass(sampler, scheme, search)
    result = run_passes([sampler, chosen], work)
    return work, sampler, result


def test_the_pass_leaves_format_sample_and_plan_in_agreement():
    work, sampler, result = run_pass(scheme(key_bits=3), SEARCH)
    made = replace(scheme(key_bits=3), **result.scheme)
    assert work.cache.rotations.keys == (made.rotate_keys == "hadamard")
    assert (work.cache.key_tensors.center is not None) == made.centers_keys == ("key_mean" in result.plan)
    assert result.statistics["output_error"]
    # The passes that follow fit feedback and clip ratio in the same coordinates.
    following = [ErrorFeedbackPass(), ClipRatioPass(sampler)]
    assert work.cache.keys.clip_ratio == 1.0
    work.replay = None
    for calibration in following[1:]:
        calibration.solve(work)
        calibration.apply(work)
    assert 0 < work.cache.keys.clip_ratio <= 1


def test_a_center_that_is_asked_for_is_made():
    asked = scheme(key_bits=2, key_center="calibrated", rotate_keys="hadamard")
    work, _, result = run_pass(asked, KVCalibration())
    assert result.scheme == {}
    assert result.plan["key_mean"].shape == (2, 8)
    assert work.cache.key_tensors.center.matrix.shape == (2, 8, 8)
    assert work.cache.rotations.keys


def test_a_center_that_is_asked_for_and_cannot_be_had_is_refused():
    asked = scheme(key_bits=2, key_center="calibrated")
    with pytest.raises(UnsupportedModelError, match="other angles where sequences are longer"):
        run_pass(asked, KVCalibration(), "RoPE of type dynamic has other angles where sequences are longer")


def test_a_rope_that_changes_with_the_length_is_noted_and_never_centered():
    _, _, result = run_pass(scheme(key_bits=3), SEARCH, "RoPE of type longrope has other angles")
    assert result.scheme["key_center"] == "none"
    assert "longrope" in result.notes[0]


def test_sequences_too_short_to_fill_a_page_leave_the_scheme_as_it_is():
    _, _, result = run_pass(scheme(key_bits=3), SEARCH, tokens=100)
    assert result.scheme == {}
    assert "too short to choose a treatment" in result.notes[0]


def test_the_constant_part_says_what_the_plan_needs():
    part = ConstantPart(rope(), torch.zeros(2, DIM), torch.zeros(2))
    assert {name: tuple(t.shape) for name, t in part.plan().items()} == {
        "key_mean": (2, DIM),
        "rope_frequencies": (DIM // 2,),
        "rope_pairs": (DIM // 2, 2),
    }
