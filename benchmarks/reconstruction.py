"""Numbers found in prompts of which caches keep a part, by what decides what is kept; bits per value, and times.

    python benchmarks/reconstruction.py MODEL [MODEL ...] --text FILE

MODEL is a directory of a chat model; FILE is the prose that numbers are hidden in. Nothing is calibrated: keys have 3
bits and values 2, in groups of 128, keys either rotated and divided by their norms or as they are. A prompt is read in
one pass and sealed, and then a number is asked for. `attention` keeps what MiniKV does, as much as fits the bytes of
`reconstruction`. Bits are those of `kvconvert/cache/size.py`, positions and full-precision tokens included, at the
prompt's length. Times are those of one prompt: of reading it, of reading it again to score it, and of reducing and
quantizing it; medians of three after one that does not count. `8b` for a MODEL is the shape of Llama 3.1 8B with random
weights, of which times alone are measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from engine_models import dense_model, llama_8b
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from kvconvert.fidelity.recall import PASSKEY_ANSWER_TOKENS, NumberBook, answer_with, passkey_right
from kvconvert.fidelity.scoring import Decoder, feed
from kvconvert.methods import KVScheme
from kvconvert.models.configuration import model_cache
from kvconvert.runtime import KVCache
from kvconvert.runtime.hf.reconstruct import score_prompt

PAGES = {
    "key_bits": 3,
    "value_bits": 2,
    "key_group_size": 128,
    "value_group_size": 128,
    "key_clip_ratio": 0.95,
    "value_clip_ratio": 0.85,
    "sink_tokens": 4,
    "rotate_values": "online",
}
ROTATED = {"rotate_keys": "hadamard", "token_norm": "per_head"}
RECENT = 0.02
SHARES = (0.3, 0.2)  # of the prompt that `reconstruction` keeps, the newest included


def bits(config: PretrainedConfig, scheme: KVScheme, length: int) -> float:
    """Bits per value once a prompt of `length` tokens has been read."""
    cache = model_cache(config, [scheme] * config.num_hidden_layers)
    return 8 * cache.exact_bytes(length) / cache.numbers(length)


def evicting(fields: Mapping[str, Any], share: float, **others: Any) -> KVScheme:
    """The pages of `fields` with a share of the prompt."""
    return KVScheme(**fields, heavy_ratio=max(0.0, share - RECENT), recent_ratio=min(RECENT, share), **others)


def cases(config: PretrainedConfig, length: int) -> dict[str, KVScheme]:
    """What is measured, by its name in the table."""
    found = {}
    for keys, fields in (("rotated keys", PAGES | ROTATED), ("plain keys", PAGES)):
        found[f"{keys}, all kept"] = KVScheme(**fields)
        for share in SHARES:
            found[f"{keys}, reconstruction {share}"] = evicting(fields, share, selection="reconstruction")
        budget = bits(config, found[f"{keys}, reconstruction {SHARES[0]}"], length)
        fitting = (n / 1000 for n in range(999, 0, -1))
        most = next(n for n in fitting if bits(config, evicting(fields, n), length) <= budget)
        found[f"{keys}, attention {most}"] = evicting(fields, most)
    return found


@torch.no_grad()
def times(model: PreTrainedModel, scheme: KVScheme, ids: torch.Tensor) -> tuple[list[float], float]:
    """Seconds of reading a prompt [1, n], scoring it, and sealing it, and measured bits per value."""
    seconds = []
    for _ in range(4):
        cache = KVCache(model.config, scheme)
        cache.begin_prompt()
        moments = [now(model)]
        feed(Decoder.plain(model), cache, ids, logits_to_keep=1)
        moments.append(now(model))
        if cache.reconstructs:
            score_prompt(model, cache, ids)
        moments.append(now(model))
        cache.seal()
        moments.append(now(model))
        seconds.append([end - begin for begin, end in pairwise(moments)])
    return [statistics.median(part) for part in zip(*seconds[1:], strict=True)], cache.stats().bits_per_value


def now(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def measure(args: argparse.Namespace, directory: Path) -> None:
    torch.manual_seed(args.seed)
    if directory.name == "8b":
        model = dense_model(llama_8b(), args.device)
        model.set_attn_implementation("kvconvert")
        drills, prompt = [], torch.randint(model.config.vocab_size, (1, args.length))
    else:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="kvconvert")
        model = model.to(args.device).eval()
        prose = tokenizer(args.text.read_text(encoding="utf8")[: 400 * args.length], add_special_tokens=False)
        drills = NumberBook(tokenizer, prose["input_ids"], args.seed).drills(args.length, args.prompts)
        prompt = torch.tensor([drills[0].context])
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"\n{directory.name}, {len(drills)} prompts of {args.length:,} tokens, {device}, bfloat16\n")
    print("| kept | bits | found | prompt, s | scoring, s | sealing, s | scoring / prompt |\n" + "| --- " * 7 + "|")
    for name, scheme in {"source": None, **cases(model.config, args.length)}.items():
        if not any(part in name for part in args.only.split(",")):
            continue
        stored, cost = 16.0 if scheme is None else bits(model.config, scheme, args.length), [""] * 4
        if scheme and not args.no_times:
            (read, scored, sealed), measured = times(model, scheme, prompt)
            assert abs(measured - stored) < 1e-9, (measured, stored)
            cost = [f"{read:.3f}", f"{scored:.3f}", f"{sealed:.3f}", f"{scored / read:.2f}"]
        found = ""
        if drills:
            caches = None if scheme is None else lambda scheme=scheme: KVCache(model.config, scheme)
            decoder = Decoder.plain(model) if caches is None else Decoder(model, caches)
            texts = answer_with(decoder, tokenizer, batch=args.batch)(drills, PASSKEY_ANSWER_TOKENS)
            right = sum(passkey_right(drill, text) for drill, text in zip(drills, texts, strict=True))
            found = f"{right} of {len(drills)}"
        print(f"| {name} | {stored:.2f} | {found} | {' | '.join(cost)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--length", type=int, default=7168, help="tokens of a prompt (default: 7168)")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", metavar="PART,...", help="cases whose names contain one of these")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for directory in args.models:
        measure(args, directory)


if __name__ == "__main__":
    main()
