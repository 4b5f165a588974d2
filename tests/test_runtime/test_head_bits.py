"""Bundles loaded with an embedding and a head of 8 bits."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny.every_type import tiny_config
from tiny.models import ARCHITECTURES, random_ids, tiny_model
from transformers import AutoModelForCausalLM

from kvconvert.bundle.figures import how_measured
from kvconvert.cli import cli
from kvconvert.errors import UnsupportedModelError, UsageError
from kvconvert.fidelity.evaluate import evaluate
from kvconvert.kernels.vocabulary import VocabularyRows
from kvconvert.runtime import load
from kvconvert.runtime.hf.vocabulary import narrow_vocabulary

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1"


def test_a_bundle_computes_nearly_what_it_does_in_16_bits():
    ids = random_ids(1, 40)
    logits = []
    for bits in (None, 8):
        model, _ = load(GOLDEN, dtype=torch.float32, head_bits=bits)
        logits.append(model(ids % model.config.vocab_size).logits)
        model.generate(ids % model.config.vocab_size, max_new_tokens=3, pad_token_id=0)
    assert 0 < float((logits[0] - logits[1]).norm() / logits[0].norm()) < 0.02


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_one_tensor_stays_one(tied):
    model = tiny_model("llama", tie_word_embeddings=tied, vocab_size=128)
    before = {name for name, _ in model.named_parameters()}
    narrow_vocabulary(model)
    assert (model.get_input_embeddings().table is model.get_output_embeddings().table) == tied
    assert {name for name, _ in model.named_parameters()} == before - {"model.embed_tokens.weight", "lm_head.weight"}
    cast = model.to(torch.bfloat16)
    assert cast.get_input_embeddings().table.scales.dtype == torch.float32
    assert cast(random_ids(1, 5) % 128).logits.dtype == torch.bfloat16


def test_embeddings_that_are_scaled_stay_so():
    model = ARCHITECTURES["gemma3_text"].build()
    ids = random_ids(2, 6) % model.config.vocab_size
    expected = model.get_input_embeddings()(ids)
    narrow_vocabulary(model)
    found = model.get_input_embeddings()(ids)
    assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("model_type", ["xglm", "biogpt"])
def test_a_scale_may_be_a_number(model_type):
    model = AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()
    ids = random_ids(1, 6)
    expected = model(ids).logits.detach()
    narrow_vocabulary(model)
    assert float((model(ids).logits.detach() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("padding", [0, 3])
def test_a_model_may_read_the_padding_tokens_row_itself(padding):
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 4104}
    model = ARCHITECTURES["gemma4"].build(pad_token_id=padding, **per_layer)
    ids = random_ids(1, 6)
    expected = model(ids).logits.detach()
    narrow_vocabulary(model)
    assert float((model(ids).logits.detach() - expected).norm() / expected.norm()) < 0.1
    assert len(model.get_input_embeddings().weight) == padding + 1


@pytest.mark.parametrize("wrong", [-1, 128])
def test_ids_that_the_vocabulary_lacks_are_refused(wrong):
    model = tiny_model("llama", vocab_size=128)
    narrow_vocabulary(model)
    with pytest.raises(IndexError):
        model(torch.tensor([[wrong]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 15, 16, 100, 600])
def test_heads_of_any_number_of_channels_are_right(channels, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, channels, generator=generator).to(dtype) for n in (50, 17))
    rows = VocabularyRows.of(weight)
    torch.testing.assert_close(rows.logits(x), rows.reference(x), atol=0.02 * channels**0.5, rtol=0.02)


def test_other_heads_are_refused_by_name():
    model = tiny_model("llama")
    model.set_output_embeddings(torch.nn.Bilinear(2, 2, 2))
    with pytest.raises(UnsupportedModelError, match="this llama model has Embedding and Bilinear; leave it out"):
        narrow_vocabulary(model)
    with pytest.raises(UsageError, match="`head_bits`"):
        load(GOLDEN, head_bits=4)


def test_commands_take_it():
    options = ["--head-bits", "8", "--max-new-tokens", "2", "--raw", "once"]
    assert CliRunner().invoke(cli, ["generate", str(GOLDEN), *options]).exit_code == 0
    refused = CliRunner().invoke(cli, ["eval", str(GOLDEN), "--head-bits", "8", "--write"])
    assert refused.exit_code == 2
    assert "--head-bits does not apply to --write" in refused.output


def test_what_a_head_of_8_bits_loses_is_measured(converted):
    options = {"against": converted / "model", "tokens": 64, "only": ["kl"], "progress": False}
    plain, narrow = (evaluate(converted / "bundle", head_bits=bits, **options) for bits in (None, 8))
    assert plain.kl.mean != narrow.kl.mean == pytest.approx(plain.kl.mean, rel=0.2)
    said = "the bundle's embedding and head were rounded to 8 bits as it was loaded"
    assert said in narrow.notes
    assert how_measured(narrow.to_dict()).endswith("the bundle's embedding and head rounded to 8 bits")
    assert "8 bits" not in how_measured(plain.to_dict())
    assert said not in plain.notes
    with pytest.raises(UsageError, match="`head_bits` does not apply to `for_record`"):
        evaluate(converted / "bundle", head_bits=8, for_record=True, **options)
