"""Quantize a model with GPTQModel: `write_gptqmodel.py MODEL OUTPUT IDS.json`; prints one line of JSON.

IDS.json holds sequences of token ids to calibrate on. Beside the checkpoint, `OUTPUT/weights.pt` has every quantized
Linear's weight as GPTQModel itself unpacks it.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

GROUP_SIZE = 64


def main(source: str, output: str, ids: str) -> None:
    """Quantize on the CPU, save, and load again."""
    rows = [
        {"input_ids": sequence, "attention_mask": [1] * len(sequence)} for sequence in json.loads(Path(ids).read_text())
    ]
    settings = QuantizeConfig(bits=4, group_size=GROUP_SIZE, sym=False, desc_act=False, act_group_aware=False)
    model = GPTQModel.load(source, settings, device="cpu")
    model.quantize(rows, batch_size=1)
    model.save(output)
    # float16 is the scales' own type; after that nothing is to be rounded.
    loaded = GPTQModel.load(output, device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    weights = {}
    for name, module in loaded.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            module.scales = module.scales.float()
            weights[name] = module.dequantize_weight().T.contiguous()
    torch.save(weights, Path(output, "weights.pt"))
    print("\n" + json.dumps({"versions": {name: version(name) for name in ("gptqmodel", "transformers", "torch")}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
