"""Quantize a model with llm-compressor, without kvconvert, in llm-compressor's own environment.

    llm_compressor.py quantize MODEL SAMPLES.safetensors OUT SETTINGS.json
    llm_compressor.py dequantize OUT WEIGHTS.safetensors

`quantize` saves the model as llm-compressor does and prints one line of JSON. SETTINGS holds method (awq, gptq or
awq+gptq), bits, group_size, batch_size, dtype (auto for the checkpoint's own) and device. `dequantize` reads what was
saved, with compressed-tensors' own unpacking, and writes every weight in float32: (q - z) scale.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def quantize(model: str, samples: str, out: str, settings: str) -> None:
    """Run llm-compressor with its defaults, but for what the settings say, on the given token ids."""
    began = time.perf_counter()
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    if not torch.accelerator.is_available():
        # Release 0.14.0.1 pins memory for copies to a GPU without asking whether there is one, and its AWQ stops there.
        IntermediatesCache.pin_memory = lambda *_: None
    chosen = json.loads(Path(settings).read_text())
    weights = {
        "num_bits": chosen["bits"],
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": chosen["group_size"],
    }
    what = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    recipe = {
        "awq": lambda: [AWQModifier(), QuantizationModifier(**what)],
        "gptq": lambda: [GPTQModifier(**what)],
        "awq+gptq": lambda: [AWQModifier(), GPTQModifier(**what)],
    }[chosen["method"]]()
    ids = load_file(samples)["ids"]
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(chosen["batch_size"])]
    imported = time.perf_counter()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=chosen["dtype"]).to(chosen["device"])
    read = time.perf_counter()
    # `batch_size=None`: what is in `batches` are batches already.
    oneshot(model=loaded, dataset=DataLoader(batches, batch_size=None), recipe=recipe, num_calibration_samples=len(ids))
    done = time.perf_counter()
    loaded.save_pretrained(out, save_compressed=True)
    saved = time.perf_counter()
    found = {
        "versions": {name: version(name) for name in ("llmcompressor", "compressed-tensors", "transformers", "torch")},
        "import_s": round(imported - began, 1),
        "load_s": round(read - imported, 1),
        "quantize_s": round(done - read, 1),
        "save_s": round(saved - done, 1),
    }
    if chosen["device"] == "cuda":
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    print("\n" + json.dumps(found))


def dequantize(saved: str, out: str) -> None:
    """Read the saved tensors; those that were not quantized are taken as they are."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    group = json.loads((Path(saved) / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    bits = group["weights"]["num_bits"]
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(Path(saved).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            stored |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a dictionary
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        linear, _, part = name.rpartition(".")
        if part == "weight_packed":
            shape, scale = stored[f"{linear}.weight_shape"].tolist(), stored[f"{linear}.weight_scale"].float()
            zeros = unpack_from_int32(stored[f"{linear}.weight_zero_point"], bits, scale.shape, packed_dim=0)
            codes = unpack_from_int32(tensor, bits, torch.Size(shape)).float().unflatten(1, (scale.shape[1], -1))
            if f"{linear}.weight_g_idx" in stored:
                raise SystemExit(f"{linear} has its inputs in another order, which is not read here")
            dense[f"{linear}.weight"] = ((codes - zeros.float()[..., None]) * scale[..., None]).flatten(1)
        elif part in ("weight", "bias"):
            dense[name] = tensor.float()
    save_file(dense, out)


if __name__ == "__main__":
    {"quantize": quantize, "dequantize": dequantize}[sys.argv[1]](*sys.argv[2:])
