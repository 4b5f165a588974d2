"""A random Llama of some hundred kilobytes with the reference model's tokenizer, for tests of the whole path."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENIZER = Path(__file__).parents[2] / "examples" / "reference-lm"
RECIPE = '[weights]\nmethod = "{method}"\ngroup_size = 16\n\n[kv]\npreset = "{kv}"\n'


def save_llama(directory: Path, **sizes: int | bool) -> LlamaForCausalLM:
    """Save a random two-layer model in bfloat16 with the reference model's tokenizer; `sizes` are of its config."""
    torch.manual_seed(0)
    common = {"vocab_size": 4096, "num_hidden_layers": 2, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**common | sizes, dtype="bfloat16")).to(torch.bfloat16)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(TOKENIZER / name, directory / name)
    return model


def write_tiny_llama(directory: Path, tied: bool = False) -> Path:
    """Save a two-layer model with its tokenizer into `directory`."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512, **heads}
    save_llama(directory, tie_word_embeddings=tied, **sizes)
    return directory


def write_recipe(path: Path, method: str = "rtn", kv: str = "oscar", limits: str = "") -> Path:
    """A recipe whose groups fit the tiny model."""
    path.write_text(RECIPE.format(method=method, kv=kv) + limits)
    return path


def write_tiny_bundle(folder: Path) -> Path:
    """`folder`/model and the bundle of it, `folder`/bundle, which is returned."""
    from kvconvert import calibrate, export

    write_tiny_llama(folder / "model", tied=True)
    recipe = write_recipe(folder / "recipe.toml", method="rtn")
    calibrate(folder / "model", folder / "work", recipe=str(recipe), samples=2, seq_len=16, progress=False)
    return export(folder / "work", folder / "bundle", progress=False)
