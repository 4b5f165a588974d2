"""Quantize a model with GPTQModel, without kvconvert, in GPTQModel's own environment.

    gptqmodel.py quantize MODEL SAMPLES.safetensors OUT SETTINGS.json
    gptqmodel.py dequantize OUT WEIGHTS.safetensors

As `llm_compressor.py` does it, whose settings these are; method is gptq, gptaq, or foem (GPTAQ and FOEM together, with
the factors that GPTQModel recommends).
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

# Not this file, which has the package's name.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402


def quantize(model: str, samples: str, out: str, settings: str) -> None:
    """Run GPTQModel with its defaults, but for what the settings say, on the given token ids."""
    began = time.perf_counter()
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization.config import FOEMConfig, GPTAQConfig

    chosen = json.loads(Path(settings).read_text())
    ids = load_file(samples)["ids"]
    tokens = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids]
    imported = time.perf_counter()
    more = {
        "gptq": {},
        "gptaq": {"gptaq": GPTAQConfig()},
        "foem": {"foem": FOEMConfig(alpha=0.25, beta=0.2)},
    }[chosen["method"]]
    what = QuantizeConfig(bits=chosen["bits"], group_size=chosen["group_size"], sym=False, **more)
    dtype = chosen["dtype"] if chosen["dtype"] == "auto" else getattr(torch, chosen["dtype"])
    loaded = GPTQModel.load(model, what, device=chosen["device"], dtype=dtype)
    read = time.perf_counter()
    loaded.quantize(tokens, batch_size=chosen["batch_size"])
    done = time.perf_counter()
    loaded.save(out)
    saved = time.perf_counter()
    found = {
        "versions": {name: version(name) for name in ("gptqmodel", "transformers", "torch")},
        "import_s": round(imported - began, 1),
        "load_s": round(read - imported, 1),
        "quantize_s": round(done - read, 1),
        "save_s": round(saved - done, 1),
    }
    if chosen["device"] == "cuda":
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    print("\n" + json.dumps(found))


def dequantize(saved: str, out: str) -> None:
    """Read the saved model; GPTQModel's own modules dequantize their weights."""
    from gptqmodel import BACKEND, GPTQModel

    model = GPTQModel.load(saved, device="cpu", backend=BACKEND.TORCH).model
    dense: dict[str, torch.Tensor] = {}
    quantized = [name for name, module in model.named_modules() if hasattr(module, "dequantize_weight")]
    if not quantized:
        raise SystemExit(f"{saved} holds no quantized Linear")
    for name in quantized:
        module = model.get_submodule(name)
        dense[f"{name}.weight"] = module.dequantize_weight().T.float().contiguous()
        if module.bias is not None:
            dense[f"{name}.bias"] = module.bias.float()
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in quantized:
            dense[name] = tensor.float().contiguous()
    if model.config.tie_word_embeddings:
        dense.pop("lm_head.weight", None)
    save_file(dense, out)


if __name__ == "__main__":
    {"quantize": quantize, "dequantize": dequantize}[sys.argv[1]](*sys.argv[2:])
