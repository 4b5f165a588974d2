"""The Engine on a GPU: tokens are read a step late there, and draws are what they are on a CPU."""

import pytest
import torch
from tiny.models import GREEDY, low_bit, random_ids, tiny_model

from kvconvert.kernels.sampling import gumbel_noise, sample
from kvconvert.runtime import Engine, Sampling
from kvconvert.runtime.engine import model_steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_noise_and_draws_are_those_of_a_cpu():
    generator = torch.Generator().manual_seed(0)
    seeds, counters = torch.randint(-(2**62), 2**62, (64,), generator=generator), torch.arange(64)
    ids = torch.arange(128_256)[None]
    noise = gumbel_noise(seeds, counters, ids)
    torch.testing.assert_close(gumbel_noise(seeds.cuda(), counters.cuda(), ids.cuda()).cpu(), noise)
    logits = torch.randn(64, 1000, generator=generator)
    temperature, top_p = torch.rand(64, generator=generator) * 2, torch.rand(64, generator=generator)
    columns = [temperature.where(torch.arange(64) % 4 > 0, 0), torch.arange(64) % 9, top_p, seeds, counters]
    drawn = sample(logits.cuda(), *(column.cuda() for column in columns))
    assert drawn.cpu().equal(sample(logits, *columns))


@pytest.mark.parametrize("scheme", ["kivi", "oscar", "minikv"])
def test_requests_in_company_give_what_generate_gives_alone(scheme, monkeypatch):
    monkeypatch.setattr(model_steps, "FEW_ROWS", 1)  # requests move to lower rows
    model = low_bit(tiny_model("llama", num_hidden_layers=2, gain=3.0, head_dim=64).cuda(), scheme)
    engine = Engine(model, max_batch=4, prompt_chunk=4096)
    assert engine._steps.lag == 1
    hot = Sampling(temperature=1.0, top_p=0.9, seed=3)
    requests = []
    for number, length in enumerate([5, 127, 128, 131, 300, 128]):
        ids = random_ids(1, length, seed=length)
        requests.append(engine.add(ids, max_new_tokens=(12, 140)[number % 2], stop_token_ids=[]))
        requests.append(engine.add(ids, max_new_tokens=30, sampling=hot, stop_token_ids=[]))
        engine.step()
    engine.run()
    for request in requests:
        if request.sampling.greedy:
            ids = torch.tensor([request.prompt], device="cuda")
            expected = model.generate(ids, max_new_tokens=request.max_new_tokens, **GREEDY)
            assert request.tokens == expected[0, ids.shape[1] :].tolist()
    drawn = [request.tokens for request in requests if not request.sampling.greedy]
    assert drawn[2] == drawn[5]  # the same prompt of 128 tokens, in other company
