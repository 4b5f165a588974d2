"""Tiny checkpoints as AutoAWQ, GPTQModel and llm-compressor write them, packed here one code at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tiny.llama import save_llama

GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes [rows, n] as int32 words along the last dimension: field i of a word is the code order[i] of it."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows = []
    for row in codes.tolist():
        starts = range(0, len(row), per_word)
        rows.append([sum(row[start + order[i]] << (bits * i) for i in range(per_word)) for start in starts])
    return torch.tensor(rows).to(torch.int32)


def awq(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """Codes [out, in], zeros and scales [out, in / g] as AutoAWQ's "gemm" stores them."""
    qweight, qzeros = (words(part.T, bits, AWQ_ORDER) for part in (codes, zeros))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.contiguous()}


def gptq_v2(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """The same as GPTQ stores it, zeros as they are."""
    order = torch.arange(codes.shape[1], dtype=torch.int32) // GROUP
    qweight = words(codes, bits).T.contiguous()
    return {"qweight": qweight, "qzeros": words(zeros.T, bits), "scales": scales.T.contiguous(), "g_idx": order}


def gptq(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """The same with zeros less 1; zeros of 0, which not every version stores in the same way, are for v2 alone."""
    return gptq_v2(codes, zeros - 1, scales, bits)


def compressed(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """The same as compressed-tensors' "pack-quantized"."""
    packed = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
    return packed | {"weight_zero_point": words(zeros.T, bits).T.contiguous()}


def symmetric(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """The same without zero points."""
    return {name: part for name, part in compressed(codes, zeros, scales, bits).items() if name != "weight_zero_point"}


def compressed_config(bits: int, is_symmetric: bool) -> dict[str, object]:
    """`quantization_config` of llm-compressor."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


GPTQ_CONFIG = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": False}
# kind: how a Linear is stored, quantization_config without and with bits
KINDS = {
    "awq": (
        awq,
        lambda bits: {
            "quant_method": "awq",
            "version": "gemm",
            "bits": bits,
            "group_size": GROUP,
            "zero_point": True,
            "modules_to_not_convert": None,
        },
    ),
    "gptq": (gptq, lambda bits: GPTQ_CONFIG | {"bits": bits, "checkpoint_format": "gptq"}),
    "gptq_v2": (gptq_v2, lambda bits: GPTQ_CONFIG | {"bits": bits, "checkpoint_format": "gptq_v2"}),
    "compressed-tensors": (compressed, lambda bits: compressed_config(bits, False)),
    "compressed-tensors, symmetric": (symmetric, lambda bits: compressed_config(bits, True)),
}


def write_packed(directory: Path, kind: str, bits: int = 4) -> LlamaForCausalLM:
    """Save a tiny Llama with quantized Linears; returns the model with their values in float32.

    Scales are bfloat16 numbers, as llm-compressor stores them; all but compressed-tensors' are stored as float16.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256, **heads}
    model = save_llama(directory, tie_word_embeddings=False, **sizes)
    store, quantization = KINDS[kind]
    tensors, middle = load_file(directory / "model.safetensors"), 2 ** (bits - 1)
    state, lowest = {name: tensor.float() for name, tensor in tensors.items()}, int(kind == "gptq")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        outputs, inputs = tensors.pop(name).shape
        codes = torch.randint(0, 2**bits, (outputs, inputs))
        zeros = torch.randint(lowest, 2**bits, (outputs, inputs // GROUP))
        zeros = torch.full_like(zeros, middle) if "symmetric" in kind else zeros
        scales = ((torch.rand(outputs, inputs // GROUP) + 0.5) / (middle * 16)).bfloat16()
        stored = scales if "compressed" in kind else scales.half()
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": value for part, value in store(codes, zeros, stored, bits).items()}
        values = (codes.unflatten(1, (-1, GROUP)) - zeros.unsqueeze(-1)) * scales.float().unsqueeze(-1)
        state[name] = values.flatten(1)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    settings = json.loads((directory / "config.json").read_text()) | {"quantization_config": quantization(bits)}
    (directory / "config.json").write_text(json.dumps(settings))
    expected = (
        LlamaForCausalLM(model.config).float().eval()
    )  # anew, for rounding to bfloat16 changed RoPE's frequencies too
    expected.load_state_dict(state)
    return expected
