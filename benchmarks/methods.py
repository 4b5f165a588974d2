"""Every cache method on the reference model: calibrated, exported, loaded, scored through its own cache, and measured.

    python benchmarks/methods.py [--segments N] [--output FILE] [--only NAME ...]

Weights stay in full precision, so that figures are the cache's. Parameters are calibrated on books-calib, figures are
of books-val. Page methods read one page and are scored on the rest of 1,024 tokens, chunk by chunk; methods that treat
whole prompts, and `oscar` beside them, read 512 tokens, seal them, and are scored on the next 512. The two columns of
KL are therefore not to be compared with each other. "Exact" is the share of attended tokens that were in full precision
while scoring. Writes JSON and prints the table of docs/methods.md; `--only` measures some methods again and keeps the
others' figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.convert.export import export
from kvconvert.convert.pipeline import calibrate
from kvconvert.data.text import load_token_samples
from kvconvert.fidelity.evaluate import text_figures, versions
from kvconvert.fidelity.scoring import Comparison, Decoder, compare, feed, seal, treats_whole_prompts
from kvconvert.runtime import load

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "reference-lm"
RESULTS = ROOT / "benchmarks" / "results" / "methods.json"
SAMPLES, LENGTH = 32, 512  # of the calibration text
MEASURED_TOKENS = 2048
FIXED = "calibrate_clip_ratios = false\ncalibrate_key_rounding = false\n"
ONE_BIT = "key_bits = 1\nvalue_bits = 1\nkey_group_size = 128\nvalue_group_size = 128\n"
# What CalibQuant's released code hard-codes at 1 bit.
RELEASED = 'preset = "calibquant-1bit"\nkey_clip_ratio = 0.5\nvalue_clip_ratio = 0.3\n'
# Name to the [kv] table of its recipe.
METHODS = {
    "kivi": 'preset = "kivi"\n' + FIXED,
    "kivi + range": 'preset = "kivi"\n',
    "kivi, G = 128": 'preset = "kivi"\nkey_group_size = 128\nvalue_group_size = 128\n' + FIXED,
    "kivi, K4V2": 'preset = "kivi"\nkey_bits = 4\n' + FIXED,
    "kivi, K2V4": 'preset = "kivi"\nvalue_bits = 4\n' + FIXED,
    "oscar": 'preset = "oscar"\n' + FIXED,
    "oscar + range": 'preset = "oscar"\n',
    "oscar-g128": 'preset = "oscar-g128"\n' + FIXED,
    "oscar-g128 + range": 'preset = "oscar-g128"\n',
    "oscar, 1 bit": 'preset = "oscar"\n' + ONE_BIT + FIXED,
    "oscar, 1 bit + range": 'preset = "oscar"\n' + ONE_BIT,
    "kitty": 'preset = "kitty"\n' + FIXED,
    "kitty, no value window": 'preset = "kitty"\nvalue_recent_tokens = 0\n' + FIXED,
    "kitty, calibrated channels": 'preset = "kitty"\nboost_select = "calibrated"\n' + FIXED,
    "kitty + range": 'preset = "kitty"\n',
    "kitty-pro": 'preset = "kitty-pro"\n' + FIXED,
    "kitty-pro, no value window": 'preset = "kitty-pro"\nvalue_recent_tokens = 0\n' + FIXED,
    "kitty on oscar": ('preset = "oscar-g128"\nboost_fraction = 0.125\nsink_tokens = 32\nvalue_recent_tokens = 128\n'),
    "static, 8 bit": 'key_bits = 8\nvalue_bits = 8\nstatic_scales = "calibrated"\n',
    "static, 4 bit": 'key_bits = 4\nvalue_bits = 4\nstatic_scales = "calibrated"\n',
    "calibquant-2bit": 'preset = "calibquant-2bit"\n',
    "calibquant-1bit": 'preset = "calibquant-1bit"\n',
    "calibquant-1bit, no tau": 'preset = "calibquant-1bit"\ntau1 = 0.0\ntau2 = 0.0\n',
    "calibquant-1bit, released ranges": RELEASED + "tau1 = 0.0\ntau2 = 0.0\n",
    "calibquant-1bit, released ranges and tau": RELEASED + "tau1 = 0.0\ntau2 = 3.0\n",
    "minikv": 'preset = "minikv"\n',
    "minikv-pyramid": 'preset = "minikv-pyramid"\n',
    "minikv, calibrated budgets": 'preset = "minikv"\nallocation = "calibrated"\n',
    "minikv on oscar": (
        'preset = "oscar"\ntoken_norm = "per_head"\nkey_group_size = 16\nheavy_ratio = 0.25\nrecent_ratio = 0.25\n'
    ),
}


def converted(name: str, table: str, directory: Path, seed: int) -> Decoder:
    """The reference model as a bundle with this cache and full-precision weights."""
    recipe = directory / "recipe.toml"
    recipe.write_text(f'[weights]\nmethod = "none"\n\n[kv]\n{table}')
    work, bundle = directory / "work", directory / "bundle"
    calibrate(str(MODEL), work, recipe=recipe, samples=SAMPLES, seq_len=LENGTH, seed=seed, progress=False)
    export(work, bundle, progress=False)
    # The fold is stored in bfloat16 as any bundle's; computing in float32 leaves that rounding in the figures.
    model, _ = load(bundle, dtype=torch.float32, verify="headers")
    print(f"calibrated and exported {name}", file=sys.stderr, flush=True)
    return Decoder(model.eval(), model.new_kv_cache)


def figures(comparison: Comparison, decoder: Decoder, ids: torch.Tensor, seed: int) -> dict:
    text = text_figures(comparison, seed)
    decoder.model.to(torch.bfloat16)  # the dtype it serves, in which full-precision tokens are counted
    cache = decoder.new_cache()
    filler = ids.flatten()[:MEASURED_TOKENS].unsqueeze(0)
    with torch.no_grad():
        for start in range(0, MEASURED_TOKENS, 1024):
            feed(decoder, cache, filler[:, start : start + 1024], logits_to_keep=1)
    seal(cache)
    decoder.model.to(torch.float32)
    config = decoder.model.config
    numbers = MEASURED_TOKENS * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    return {
        "kl": text["kl"].mean,
        "kl_interval": text["kl"].mean_interval,
        "kl_p99": text["kl"].p99,
        "top1_agreement": text["top1_agreement"],
        "full_precision_share": comparison.residual_share,
        "bits_per_prompt_value": 8 * cache.stats().bytes_used / numbers,
        "schemes": sorted({json.dumps(scheme.to_dict(), sort_keys=True) for scheme in cache.schemes if scheme}),
    }


def markdown(report: dict) -> str:
    lines = [
        "| scheme | KL, page by page | KL after a sealed prompt | 99 % | same first token | exact | bits per value |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in report["methods"].items():
        kl = f"{row['kl']:.4f}"
        pages, prompts = ("", kl) if row["whole_prompt"] else (kl, "")
        share, exact = (f"{100 * row[key]:.1f} %" for key in ("top1_agreement", "full_precision_share"))
        bits = f"{row['bits_per_prompt_value']:.2f}"
        lines.append(f"| {name} | {pages} | {prompts} | {row['kl_p99']:.3f} | {share} | {exact} | {bits} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", choices=METHODS, metavar="NAME", help="measure these and keep the rest")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    source = Decoder.plain(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval())
    held_out = load_token_samples(None, tokenizer, args.segments, 1025, args.seed, "evaluation")
    report: dict = {
        "command": (
            f"python benchmarks/methods.py --segments {args.segments} --seed {args.seed} --threads {args.threads}"
        ),
        "seed": args.seed,
        "versions": versions(),
        "calibrated_on": {"samples": SAMPLES, "length": LENGTH, "text": "books-calib"},
        "measured_on": held_out.info.model_dump(),
        "methods": {},
    }
    if args.only:
        report["methods"] = json.loads(args.output.read_text(encoding="utf-8"))["methods"]
    for name, table in METHODS.items():
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as directory:
            decoder = converted(name, table, Path(directory), args.seed)
        whole = treats_whole_prompts(decoder.new_cache())
        compared = compare(source, {name: decoder}, held_out.ids, 512 if whole else 128)[name]
        row = figures(compared, decoder, held_out.ids, args.seed) | {"whole_prompt": whole}
        report["methods"][name] = row
        if name == "oscar":
            again = compare(source, {name: decoder}, held_out.ids, 512)[name]
            beside = figures(again, decoder, held_out.ids, args.seed) | {"whole_prompt": True}
            report["methods"]["oscar, for comparison"] = beside
    args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main()
