"""States in 12 bits, and a step of the gated delta rule over them, equal their references."""

import pytest
import torch
from tiny.families import FAMILIES
from tiny.models import ARCHITECTURES, GREEDY, random_ids

from kvconvert.kernels.device import interpreted
from kvconvert.kernels.states import (
    SelectiveToken,
    can_pack,
    gated_delta_step,
    gated_delta_step_reference,
    pack,
    pack_reference,
    packed_like,
    selective_step,
    selective_step_reference,
    step_unsupported,
    unpack,
    unpack_reference,
    unsupported,
)
from kvconvert.methods import KVScheme
from kvconvert.runtime.hf.generation import adopt
from kvconvert.runtime.hf.states import state_modules

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def empty(shape, device):
    return packed_like(torch.zeros(shape, device=device))


def step_of(packed):
    """The scales of packed states, [B, ..., 1]."""
    return unpack_reference(packed).abs().amax(-1, keepdim=True) / 2047


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (3, 2, 5, 64), (2, 7, 128), (1, 3, 33, 256)], ids=str)
def test_kernels_equal_the_reference(device, shape):
    states = draw(*shape) * 10 ** draw(*shape[:-1], 1, seed=1)
    states[0, 0] = 0
    packed = empty(shape, device)
    assert unsupported(states.to(device)) is None
    pack(states.to(device), packed)
    expected = unpack_reference(pack_reference(states)).to(device)
    # Where a number lies between two codes, a division that rounds otherwise may take the other one.
    difference = (unpack_reference(packed) - expected).abs()
    assert bool((difference <= 1.001 * step_of(packed)).all())
    assert (difference > 0.5 * step_of(packed)).float().mean() < 1e-3
    assert torch.equal(unpack(packed), unpack_reference(packed))


def test_the_reference_rounds_to_the_nearest_of_2047_steps():
    states = draw(2, 3, 4, 32)
    found = unpack_reference(pack_reference(states))
    step = states.abs().amax(-1, keepdim=True) / 2047
    assert bool(((found - states).abs() <= 0.5001 * step).all())
    assert torch.equal(found, unpack_reference(pack_reference(found)))
    found = pack_reference(torch.tensor([[[2047.0, -2047.0, -1.0, 17.0], [0.0, 0.0, 0.0, 0.0]]]))
    codes, rest = found.flatten().split([12, 8])
    assert codes.tolist() == [127, 128, 255, 1, 0, 0, 0, 0, 0xFF, 0x11, 0, 0]
    assert rest.view(torch.float32).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_not_a_number_and_others_are_as_they_were(device, value):
    states = draw(1, 2, 4, 32)
    states[0, 1, 2, 5] = value
    packed = empty(states.shape, device)
    pack(states.to(device), packed)
    for found in (unpack(packed).cpu(), unpack_reference(pack_reference(states))):
        assert not found[0, 1, 2].isfinite().any()
        assert found[0, 0].isfinite().all()
        assert found[0, 1, [0, 1, 3]].isfinite().all()


@pytest.mark.each_value
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "key_heads", "heads", "key_dim", "value_dim"),
    [(1, 1, 1, 16, 16), (2, 2, 4, 64, 32), (1, 1, 3, 32, 64), pytest.param(2, 1, 3, 128, 128, marks=pytest.mark.full)],
)
def test_a_step_equals_the_reference(device, dtype, by_channel, rows, key_heads, heads, key_dim, value_dim):
    # As modules give them: parts of one tensor of all channels.
    mixed = draw(rows, 1, 2 * key_heads * key_dim + heads * value_dim).to(device, dtype)
    sizes, counts = [key_heads * key_dim] * 2 + [heads * value_dim], (key_heads, key_heads, heads)
    query, key, value = (x.unflatten(2, (n, -1)) for x, n in zip(mixed.split(sizes, 2), counts, strict=True))
    decay = -draw(*((rows, 1, heads, key_dim) if by_channel else (rows, 1, heads)), seed=2).abs().to(device)
    beta = draw(rows, 1, heads, seed=3).sigmoid().to(device, dtype)
    packed = empty((rows, heads, key_dim, value_dim), device)
    pack(draw(rows, heads, key_dim, value_dim, seed=4).to(device), packed)
    assert step_unsupported(query, value, packed) is None
    expected, after = gated_delta_step_reference(query, key, value, decay, beta, unpack_reference(packed))
    found = gated_delta_step(query, key, value, decay, beta, packed)
    assert found.dtype == dtype
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(found, expected, **tolerance)
    error = (unpack(packed) - after).abs()
    assert bool((error <= 1.01 * step_of(packed) + 1e-5).all())


@pytest.mark.each_value
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "groups", "heads", "head_dim", "state"), [(1, 1, 1, 16, 16), (2, 2, 4, 64, 32), (1, 1, 3, 32, 128)]
)
def test_a_step_of_mamba_equals_the_reference(device, dtype, plain, rows, groups, heads, head_dim, state):
    sizes, counts = [heads * head_dim] * 2 + [groups * state] * 2, (heads, heads, groups, groups)
    x, gate, b, c = draw(rows, sum(sizes)).to(device, dtype).split(sizes, 1)
    x, gate, b, c = (v.unflatten(1, (n, -1)) for v, n in zip((x, gate, b, c), counts, strict=True))
    dt, decay, d, bias = (draw(n, heads, seed=n).to(device) for n in (rows, 5, 6, 7))
    decay, d, bias = -decay[0].abs(), d[0], bias[0]
    if plain:
        d = bias = gate = None
    packed = empty((rows, heads, head_dim, state), device)
    pack(draw(rows, heads, head_dim, state, seed=4).to(device), packed)
    given = SelectiveToken(x, dt.to(dtype), decay, b, c, d, bias, gate)
    expected, after = selective_step_reference(given, unpack_reference(packed))
    found = selective_step(given, packed)
    assert found.dtype == dtype
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    error = (unpack(packed) - after).abs()
    assert bool((error <= 1.01 * step_of(packed) + 1e-5).all())


def test_the_reference_of_mamba_is_the_recurrence_as_its_equation_states_it():
    x, dt, decay, b, c = (
        draw(1, 1, 4),
        torch.tensor([[0.3]]),
        torch.tensor([-0.7]),
        draw(1, 1, 8),
        draw(1, 1, 8, seed=1),
    )
    h = draw(1, 1, 4, 8, seed=2)
    token = SelectiveToken(x, dt, decay, b, c, torch.tensor([0.5]), None, None)
    output, after = selective_step_reference(token, h)
    step = torch.log1p(dt.exp())
    expected = (step * decay).exp() * h[0, 0] + step * torch.outer(x[0, 0], b[0, 0])
    torch.testing.assert_close(after[0, 0], expected)
    torch.testing.assert_close(output[0, 0], expected @ c[0, 0] + 0.5 * x[0, 0])


def test_the_reference_is_the_rule_as_its_equation_states_it():
    query, key, value = (draw(1, 1, 1, 4, seed=seed).double() for seed in range(3))
    decay, beta, states = torch.tensor([[[-0.3]]]), torch.tensor([[[0.6]]]), draw(1, 1, 4, 4, seed=3)
    k, q, v = key[0, 0, 0] / key.norm(), query[0, 0, 0] / query.norm(), value[0, 0, 0]
    alpha, state = decay.double().exp().item(), states[0, 0].double()
    erased = alpha * (torch.eye(4).double() - 0.6 * torch.outer(k, k)) @ state + 0.6 * torch.outer(k, v)
    output, after = gated_delta_step_reference(query.float(), key.float(), value.float(), decay, beta, states)
    torch.testing.assert_close(after[0, 0].double(), erased, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output[0, 0, 0].double(), erased.T @ q / 2, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_packed():
    assert can_pack(torch.zeros(1, 2, 3, 4))
    assert not can_pack(torch.zeros(1, 8))
    assert not can_pack(torch.zeros(1, 2, 3, 5))
    assert not can_pack(torch.zeros(1, 2, 4, dtype=torch.bfloat16))
    # Sizes that kernels do not take go through PyTorch.
    packed = packed_like(states := draw(1, 2, 6))
    pack(states, packed)
    torch.testing.assert_close(unpack(packed), states, rtol=0, atol=2e-3)


@pytest.mark.quick("lfm2")
@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "lfm2"])
def test_modules_give_with_kernels_what_they_give_without(device, name):
    logits = []
    for kernels in (True, False):
        model = (ARCHITECTURES | FAMILIES)[name].build().to(device)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        adopt(model, [KVScheme(key_bits=16, value_bits=16, state_bits=12)] * layers, {})
        for module in state_modules(model) if not kernels else ():
            module.steps_equal = False  # as if a trial had found it
        with interpreted(kernels and device.type == "cpu"):
            ids = random_ids(2, 8).to(device)
            options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
            found = model.generate(ids, **options, **GREEDY)
        logits.append(torch.stack(found.logits).cpu())
        assert all(module.steps_equal == kernels for module in state_modules(model))
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
