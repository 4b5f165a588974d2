"""Make the golden bundle of the present format version anew: `python tests/golden/make_golden.py`.

The bundle in `format-1` is committed and has to keep loading. It is a random Llama of four small layers with a
tokenizer of bytes, AWQ weights, and in each layer another kind of plan: OScaR's fold, Kitty's calibrated boost,
CalibQuant's taus, and error feedback. `format-1.json` beside it holds what it computed when it was made.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import kvconvert
from kvconvert.bundle.manifest import FORMAT_VERSION
from kvconvert.runtime import load

HERE = Path(__file__).parent
PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 160, 12, 256
RECIPE = """
[weights]
method = "awq"
group_size = 16

[kv]
preset = "oscar"

[[kv.layers]]
index = [1]
preset = "kitty"
boost_select = "calibrated"

[[kv.layers]]
index = [2]
preset = "calibquant-1bit"

[[kv.layers]]
index = [3]
preset = "oscar"
key_rounding = "error_feedback"
"""


def prompt() -> torch.Tensor:
    """Token ids [1, T] that depend on no library's random numbers."""
    return torch.tensor([[(7 * i * i + 3 * i) % VOCABULARY for i in range(PROMPT_TOKENS)]])


def compute(bundle: Path) -> dict[str, list]:
    """What a bundle computes: greedy tokens after the prompt, and float32 logits [5, 8] of its last positions."""
    model, _ = load(bundle, dtype=torch.float32)
    ids = prompt()
    with torch.no_grad():
        tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        logits = model(ids).logits[0, -5:, :8]
    return {"tokens": tokens[0, PROMPT_TOKENS:].tolist(), "logits": logits.tolist()}


def write_source(directory: Path) -> None:
    """The model that is converted."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # so that logits are far apart and tokens certain
        parameter.data.mul_(4) if parameter.dim() > 1 else None
    model.to(torch.bfloat16).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def make(target: Path) -> None:
    """Convert into `target`, which is replaced."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_source(root / "golden")
        (root / "recipe.toml").write_text(RECIPE)
        kvconvert.calibrate(
            root / "golden", root / "work", recipe=root / "recipe.toml", samples=2, seq_len=256, progress=False
        )
        bundle = kvconvert.export(root / "work", root / "bundle", progress=False)
        expected = compute(bundle)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(bundle, target)
    (HERE / f"{target.name}.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / f"format-{FORMAT_VERSION}")
