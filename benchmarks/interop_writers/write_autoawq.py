"""Quantize a model with AutoAWQ: `write_autoawq.py MODEL OUTPUT IDS.json`; prints one line of JSON.

IDS.json holds sequences of token ids to calibrate on. Beside the checkpoint, `OUTPUT/weights.pt` has every quantized
Linear's weight as AutoAWQ itself unpacks it.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from awq import AutoAWQForCausalLM
from awq.modules.linear import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm

GROUP_SIZE = 64


def main(source: str, output: str, ids: str) -> None:
    """Quantize on the CPU, and save."""
    sequences = json.loads(Path(ids).read_text())
    model = AutoAWQForCausalLM.from_pretrained(source, device_map="cpu", torch_dtype=torch.float32)
    model.quantize(
        None,
        quant_config={"zero_point": True, "q_group_size": GROUP_SIZE, "w_bit": 4, "version": "GEMM"},
        calib_data=sequences,
        max_calib_samples=len(sequences),
        max_calib_seq_len=len(sequences[0]),
    )
    model.save_quantized(output)
    weights = {}
    for name, module in model.model.named_modules():
        if isinstance(module, WQLinear_GEMM):
            packed = (module.qweight, module.qzeros, module.scales.float())  # so that nothing is rounded
            weights[name] = dequantize_gemm(*packed, module.w_bit, module.group_size).T.contiguous()
    torch.save(weights, Path(output, "weights.pt"))
    print("\n" + json.dumps({"versions": {name: version(name) for name in ("autoawq", "transformers", "torch")}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
