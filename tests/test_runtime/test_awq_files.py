"""An exported directory is a standard AWQ checkpoint: read here with numpy and the published layout alone."""

import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.numpy import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvconvert import Recipe, calibrate, export, load
from kvconvert.kernels.linear import QuantizedLinear

REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "reference-lm"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of column c holds output channel 8 c + ORDER[i]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A random Qwen2, whose attention Linears have biases, as a bundle with the value rotation folded in."""
    root = tmp_path_factory.mktemp("awq")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=3,
        head_dim=32,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=0,
        max_position_embeddings=256,
    )
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    model.to(torch.float16).save_pretrained(root / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REFERENCE / name, root / "source")
    (root / "recipe.toml").write_text("[weights]\ngroup_size = 32\nkept_share = 0\n")
    recipe = Recipe.load(str(root / "recipe.toml"))
    calibrate(str(root / "source"), root / "work", recipe=recipe, samples=2, seq_len=64, progress=False)
    return export(root / "work", root / "bundle", progress=False)


def unpack(words: numpy.ndarray) -> numpy.ndarray:
    """int32 [rows, n / 8] to codes [rows, n]."""
    codes = numpy.empty((words.shape[0], words.shape[1] * 8), dtype=numpy.int64)
    for nibble, channel in enumerate(ORDER):
        codes[:, channel::8] = (words.astype(numpy.int64) >> (4 * nibble)) & 15
    return codes


def read_weights(bundle: Path) -> dict[str, numpy.ndarray]:
    """Every quantized weight [in, out] in float64, from the files alone."""
    group = json.loads((bundle / "config.json").read_text())["quantization_config"]["group_size"]
    tensors = load_file(bundle / "model.safetensors")
    weights = {}
    for name, words in tensors.items():
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            scales, zeros = tensors[f"{module}.scales"], unpack(tensors[f"{module}.qzeros"])
            assert (words.dtype, scales.dtype) == (numpy.int32, numpy.float16)
            zero, scale = (numpy.repeat(x, group, axis=0) for x in (zeros, scales.astype(numpy.float64)))
            weights[module] = (unpack(words) - zero) * scale
    return weights


def test_an_independent_reader_computes_with_the_weights_that_the_runtime_uses(bundle):
    weights = read_weights(bundle)
    assert len(weights) == 2 * 7
    model, _ = load(bundle, dtype=torch.float32)
    for name, weight in weights.items():
        module = model.get_submodule(name)
        assert isinstance(module, QuantizedLinear)
        with torch.no_grad():
            outputs = module(torch.eye(module.in_features))
        bias = 0.0 if module.bias is None else module.bias.double().numpy()
        # float32 holds a 4-bit code times a float16 scale exactly; adding the bias rounds once
        numpy.testing.assert_allclose(outputs.double().numpy(), weight + bias, rtol=1e-6, atol=1e-7)


def test_its_logits_are_those_of_an_unquantized_model_with_these_weights(bundle):
    """A stock model, filled with what the independent reader found, in float16 as AWQ engines compute."""
    config = json.loads((bundle / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert {k: quantization[k] for k in ("quant_method", "bits", "zero_point", "version")} == {
        "quant_method": "awq",
        "bits": 4,
        "zero_point": True,
        "version": "gemm",
    }
    stock = Qwen2ForCausalLM(Qwen2Config(**config)).float().eval()
    tensors = load_file(bundle / "model.safetensors")
    state = {
        name: torch.from_numpy(t).float()
        for name, t in tensors.items()
        if t.dtype == numpy.float16 and "scales" not in name
    }
    state |= {f"{name}.weight": torch.from_numpy(w.T.copy()).float() for name, w in read_weights(bundle).items()}
    missing, unexpected = stock.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("rotary" in name or name == "lm_head.weight" for name in missing)
    model, _ = load(bundle, dtype=torch.float32)
    ids = torch.randint(1, 4096, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = stock(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    assert (got - expected).abs().max() < 2**-10 * expected.abs().max()  # float16's rounding, computed in float32
