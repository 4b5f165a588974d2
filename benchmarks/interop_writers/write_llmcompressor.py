"""Quantize a model with llm-compressor: `write_llmcompressor.py MODEL OUTPUT IDS.json SCHEME`; prints one line of JSON.

SCHEME is one of its names, such as W4A16_ASYM. IDS.json holds sequences of token ids to calibrate on. Beside the
checkpoint, `OUTPUT/weights.pt` has every quantized Linear's weight as llm-compressor quantized it, before packing.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM


def main(source: str, output: str, ids: str, scheme: str) -> None:
    """Quantize on the CPU, and save."""
    sequences = json.loads(Path(ids).read_text())
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": sequences, "attention_mask": [[1] * len(row) for row in sequences]}),
        recipe=GPTQModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]),
        max_seq_length=len(sequences[0]),
        num_calibration_samples=len(sequences),
    )
    weights = {}
    for name, module in model.named_modules():
        settings = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if settings is not None:
            # In float32, so that nothing is rounded after quantizing.
            grid = {"scale": module.weight_scale.float(), "zero_point": module.weight_zero_point, "args": settings}
            codes = quantize(x=module.weight.float(), dtype=torch.int8, **grid)
            weights[name] = dequantize(codes, dtype=torch.float32, **grid).detach().clone()
    model.save_pretrained(output, save_compressed=True)
    torch.save(weights, Path(output, "weights.pt"))
    packages = ("llmcompressor", "compressed-tensors", "transformers", "torch")
    print("\n" + json.dumps({"versions": {name: version(name) for name in packages}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
