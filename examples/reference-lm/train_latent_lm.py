"""Train a small language model, on a GPU if there is one, whose attention stores no keys and values per head.

The text, the drills of recall, and the phases are those of `train_reference_lm.py` with shorter rows; what differs is
the attention. By default it is DeepSeek-V3's (MLA), which stores a latent vector of 128 channels and a shared RoPE part
of 32 per token and layer, for 4 heads of 64 channels. With `--hybrid` it is Qwen3.5's: three layers of linear attention,
whose state has 4 heads of 64 x 64 numbers, and one of softmax attention.

    python train_latent_lm.py TRAIN.txt VAL.txt OUT_DIR [--minutes 32] [--hybrid]
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from train_reference_lm import PHASES, Rows, build_tokenizer, evaluate, train
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedConfig, Qwen3_5TextConfig

LAYERS = 3
CONTEXT, ROWS = {"prose": 256, "lookup": 96, "long recall": 640}, {"prose": 12, "lookup": 32, "long recall": 4}
# Recall takes most of the time: it is what attention is measured by.
SHARES = {"prose": 0.2, "lookup": 0.4, "long recall": 0.4}


def config(vocabulary: int, end: int, hybrid: bool) -> PreTrainedConfig:
    """The model's shape; every layer has a dense MLP."""
    shared = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 512,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    if hybrid:
        return Qwen3_5TextConfig(
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            **shared,
        )
    return DeepseekV3Config(
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,
        num_nextn_predict_layers=0,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        **shared,
    )


def main() -> None:
    """Train for a wall-clock time, phase by phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="file of plain text to train on")
    parser.add_argument("val", type=Path, help="file of held-out text")
    parser.add_argument("out", type=Path, help="directory of the model to write")
    parser.add_argument("--minutes", type=float, default=32)
    parser.add_argument("--hybrid", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.hybrid:
        # Its steps from chunk to chunk cannot be compiled for rows of several lengths.
        torch._dynamo.config.disable = True
    text = args.train.read_text(encoding="utf-8")
    tokenizer = build_tokenizer(text, 1024)
    rows = Rows(tokenizer, tokenizer(text)["input_ids"], args.seed)
    held_out = Rows(tokenizer, tokenizer(args.val.read_text(encoding="utf-8")[:400_000])["input_ids"], args.seed + 1)
    model = AutoModelForCausalLM.from_config(config(len(tokenizer), tokenizer.eos_token_id, args.hybrid))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{model.num_parameters():,} parameters, {len(rows.ids):,} tokens of text", flush=True)
    seen = 0
    for phase in PHASES:
        phase = replace(phase, context=CONTEXT[phase.name], batch=ROWS[phase.name])
        seen += train(model, phase, rows, SHARES[phase.name] * args.minutes * 60)
        print(phase.name, evaluate(model, held_out, 640), flush=True)
    result = evaluate(model, held_out, 640) | {"tokens": seen, "minutes": args.minutes, "seed": args.seed}
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
