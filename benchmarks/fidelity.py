"""What each method keeps, on the reference model: weights (AWQ against rounding), cache (OScaR against KIVI), bytes.

    python benchmarks/fidelity.py [--text FILE] [--segments N] [--output FILE]

Parameters are chosen on one text (books-calib), figures reported on another (books-val): KL to the full-precision model
in nats, over continuation tokens scored through the cache. Methods see the same segments; an interval is the 95 %
bootstrap over segments of the paired difference. Writes JSON, which `make docs` shows in
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from kvconvert.calibration.activations import ActivationRecorder, ActivationStatistics
from kvconvert.calibration.awq_clips import apply_clips, search_clips
from kvconvert.calibration.awq_scales import search_scales
from kvconvert.calibration.awq_scaling import apply_scales
from kvconvert.data.text import load_token_samples
from kvconvert.fidelity.bootstrap import bootstrap_mean
from kvconvert.fidelity.evaluate import text_figures, versions
from kvconvert.fidelity.scoring import Comparison, Decoder, before_chunks, compare, feed
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.methods import KVScheme
from kvconvert.models.adapters import require_adapter
from kvconvert.models.structure import LayerStructure
from kvconvert.runtime import KVCache

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "reference-lm"
RESULTS = ROOT / "benchmarks" / "results" / "fidelity.json"
WEIGHT_GROUP = 128
WEIGHT_BITS = (4, 3)
CALIBRATION = (64, 512)  # samples, tokens in each: the defaults of `kvconvert calibrate`
SEGMENT_TOKENS = 1024
# As `KVCache(config, NAME)` takes them: sink tokens, but nothing calibrated.
SCHEMES = {
    "kivi, G = 32": KVScheme.preset("kivi"),
    "oscar, G = 32": KVScheme.preset("oscar"),
    "kivi, G = 128": replace(KVScheme.preset("kivi"), key_group_size=128, value_group_size=128),
    "oscar, G = 128": KVScheme.preset("oscar-g128"),
}
# Scale search, clip search, and whether what the searches saw of the activations was dealt to the wrong channels:
# "statistic" the mean |x| that makes candidate scales, "activations" everything, as if calibrated on another model.
WEIGHT_METHODS = {
    "rtn": (False, False, None),
    "AWQ": (True, True, None),
    "AWQ, shuffled activations": (True, True, "activations"),
    "AWQ, shuffled statistic": (True, True, "statistic"),
    "scales alone": (True, False, None),
    "scales alone, shuffled statistic": (True, False, "statistic"),
    "clips alone": (False, True, None),
}
# (worse, better): positive differences say that the second has the lower KL.
WEIGHT_COMPARISONS = [
    ("rtn", "AWQ"),
    ("AWQ, shuffled activations", "AWQ"),
    ("AWQ, shuffled statistic", "AWQ"),
    ("rtn", "scales alone"),
    ("scales alone, shuffled statistic", "scales alone"),
    ("clips alone", "AWQ"),
]
WEIGHT_PAIRS = [
    (f"{bits} bits: {worse} - {better}", f"{worse} ({bits} bits)", f"{better} ({bits} bits)")
    for bits in WEIGHT_BITS
    for worse, better in WEIGHT_COMPARISONS
]
KV_PAIRS = [(f"kivi - oscar, G = {g}", f"kivi, G = {g}", f"oscar, G = {g}") for g in (32, 128)]


@torch.no_grad()
def observe(model: LlamaForCausalLM, structure: LayerStructure, ids: torch.Tensor) -> list[ActivationStatistics]:
    """Activations of every layer, from one pass of the unquantized model over ids [samples, length]."""
    recorders = [ActivationRecorder(structure, *ids.shape, WEIGHT_GROUP) for _ in model.model.layers]
    with ExitStack() as hooks:
        for layer, recorder in zip(model.model.layers, recorders, strict=True):
            hooks.enter_context(recorder.attached(layer))
        for sample in tqdm(ids, desc="observing"):
            model(input_ids=sample.unsqueeze(0), use_cache=False, logits_to_keep=1)
    return [recorder.result() for recorder in recorders]


def shuffled(
    observed: ActivationStatistics, structure: LayerStructure, what: str | None, seed: int
) -> ActivationStatistics:
    """Activations with permuted channels: whole groups, and channels within, so that second moments stay blocks."""
    if what is None:
        return observed
    generator = torch.Generator().manual_seed(seed)
    mean_abs, moments, tokens, sequences = {}, {}, {}, observed.sequences
    for name, statistic in observed.mean_abs.items():
        groups = torch.randperm(len(statistic) // WEIGHT_GROUP, generator=generator)
        inner = torch.randperm(WEIGHT_GROUP, generator=generator)
        channels = (groups[:, None] * WEIGHT_GROUP + inner).flatten()
        mean_abs[name] = statistic[channels]
        moments[name] = observed.second_moment[name][groups][:, inner][:, :, inner]
        tokens[name] = observed.tokens[name][:, channels]
        if name == structure.query.linear:
            sequences = sequences[..., channels]
    if what == "statistic":
        return replace(observed, mean_abs=mean_abs)
    return replace(observed, mean_abs=mean_abs, second_moment=moments, tokens=tokens, sequences=sequences)


@torch.no_grad()
def quantized(
    model: LlamaForCausalLM,
    structure: LayerStructure,
    bits: int,
    scale: bool,
    clip: bool,
    seen: list[ActivationStatistics],
) -> LlamaForCausalLM:
    """A copy with fake-quantized Linears. Norms are rounded to bf16, as a conversion would store them."""
    model = copy.deepcopy(model)
    for layer, observed in zip(model.model.layers, seen, strict=True):
        scalings, clips = [], {}
        if scale:
            scalings, _ = search_scales(layer, structure, observed, bits, WEIGHT_GROUP, dtype=torch.bfloat16)
        if clip:
            clips = search_clips(layer, structure, observed, scalings, bits, WEIGHT_GROUP)
        apply_scales(layer, structure, scalings, torch.bfloat16)
        apply_clips(layer, clips, WEIGHT_GROUP)
        for name in structure.linears:
            weight = layer.get_submodule(name).weight
            weight.copy_(fake_quantize_weight(weight, bits, WEIGHT_GROUP))
    return model


def weight_variants(model: LlamaForCausalLM, ids: torch.Tensor, seed: int) -> dict[str, Decoder]:
    """Fake-quantized models by name; the searches are given ids [samples, length], nothing of the text reported on."""
    structure = require_adapter(model.config).structure(model.config, 0)
    observed = observe(model, structure, ids)
    jobs = [(bits, name, *method) for bits in WEIGHT_BITS for name, method in WEIGHT_METHODS.items()]
    variants = {}
    for bits, name, scale, clip, shuffle in tqdm(jobs, desc="quantizing weights"):
        seen = [shuffled(layer, structure, shuffle, seed + index) for index, layer in enumerate(observed)]
        variants[f"{name} ({bits} bits)"] = Decoder.plain(quantized(model, structure, bits, scale, clip, seen))
    return variants


def cache_variants(model: LlamaForCausalLM) -> dict[str, Decoder]:
    """The unconverted model with each scheme's cache; what a bundle folds is done at run time."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("kvconvert")

    def make(scheme: KVScheme):
        return lambda: KVCache(model.config, scheme.with_online_rotation())

    return {name: Decoder(model, make(scheme)) for name, scheme in SCHEMES.items()}


@torch.no_grad()
def cache_bytes(model: LlamaForCausalLM, ids: torch.Tensor) -> list[dict]:
    """Measured bytes of bf16 caches; 124, 100 and 94 tokens wait for their page to be complete."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    model.set_attn_implementation("kvconvert")
    rows = []
    for name, scheme in SCHEMES.items():
        for tokens in (2048, 4200, 8290):
            filler = ids.flatten().repeat(-(-tokens // ids.numel()))[:tokens].unsqueeze(0)
            cache = KVCache(model.config, scheme.with_online_rotation())
            decoder = Decoder(model, lambda cache=cache: cache)
            for start in range(0, tokens, SEGMENT_TOKENS):
                feed(decoder, cache, filler[:, start : start + SEGMENT_TOKENS], logits_to_keep=1)
            stats = cache.stats()
            rows.append(
                {
                    "scheme": name,
                    "tokens": tokens,
                    "residual_tokens": stats.residual_tokens,
                    "bits_per_value": stats.bits_per_value,
                    "bytes_used": stats.bytes_used,
                    "bytes_allocated": stats.bytes_allocated,
                    "smaller_than_bf16": 2 * stats.values / stats.bytes_used,
                    "allocated_over_used": stats.bytes_allocated / stats.bytes_used,
                }
            )
    return rows


def figures(comparisons: dict[str, Comparison], seed: int) -> dict[str, dict]:
    """Perplexity, KL and agreement of each method."""
    return {
        name: {key: value if isinstance(value, float | tuple) else asdict(value) for key, value in table.items()}
        for name, table in ((name, text_figures(comparison, seed)) for name, comparison in comparisons.items())
    }


def differences(comparisons: dict[str, Comparison], pairs: list[tuple[str, str, str]], seed: int) -> dict[str, dict]:
    """Paired differences in mean KL per segment."""
    return {
        label: asdict(bootstrap_mean((comparisons[worse].kl - comparisons[better].kl).mean(1), seed))
        for label, worse, better in pairs
    }


def markdown(report: dict) -> str:
    """The tables that are printed."""
    lines = []
    for part, title in (("weights", "weights"), ("cache", "KV cache, 2 bits")):
        lines += [f"| {title} | KL | 99% | perplexity | same first token |", "|---|---|---|---|---|"]
        source = next(iter(report[part]["methods"].values()))["perplexity"]["source"]
        lines.append(f"| full precision | 0 | 0 | {source:.2f} | 100% |")
        for name, row in report[part]["methods"].items():
            lines.append(
                f"| {name} | {row['kl']['mean']:.4f} | {row['kl']['p99']:.3f} | {row['perplexity']['bundle']:.2f} "
                f"| {row['top1_agreement']:.1%} |"
            )
        lines += ["", "| paired difference in KL | mean | 95% interval |", "|---|---|---|"]
        for name, row in report[part]["differences"].items():
            lines.append(f"| {name} | {row['mean']:+.4f} | {row['low']:+.4f} to {row['high']:+.4f} |")
        lines.append("")
    lines += [
        "| KV bytes (bf16 as 16 bit) | tokens | bits per value | smaller than bf16 | allocated / used |",
        "|---|---|---|---|---|",
    ]
    for row in report["bytes"]:
        lines.append(
            f"| {row['scheme']} | {row['tokens']:,} | {row['bits_per_value']:.2f} | {row['smaller_than_bf16']:.2f}x "
            f"| {row['allocated_over_used']:.3f} |"
        )
    return "\n".join(lines)


def tables(report: dict) -> str:
    """How it was measured, and the tables."""
    text = (
        f"`{report['command']}`, torch {report['versions']['torch']}: {report['scored_tokens']:,} scored tokens; while "
        f"caches were scored, {report['residual_share']:.0%} of the attended tokens were in full precision."
    )
    return f"{text}\n\n{markdown(report)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="held-out text to report on (default: the excerpt that ships with kvconvert)")
    parser.add_argument("--segments", type=int, default=24, help=f"segments of {SEGMENT_TOKENS} tokens (default: 24)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of torch; results depend on it in the last digits")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    calibration = load_token_samples(None, tokenizer, *CALIBRATION, args.seed)
    held_out = load_token_samples(args.text, tokenizer, args.segments, SEGMENT_TOKENS, args.seed, "evaluation")
    source = Decoder.plain(model)
    # Full-precision caches do not care how the text is cut into chunks; one is the fastest.
    whole = {"chunk": SEGMENT_TOKENS, "batch": 1, "progress": True}
    weights = compare(source, weight_variants(model, calibration.ids, args.seed), held_out.ids, **whole)
    caches = cache_variants(model)
    # All keep as many sink tokens, so that all their pages, and the chunks, end at the same tokens.
    (first,) = {before_chunks(decoder.new_cache()) for decoder in caches.values()}
    cache = compare(source, caches, held_out.ids, first, progress=True)
    report = {
        "command": " ".join(["python benchmarks/fidelity.py", *sys.argv[1:]]),
        "seed": args.seed,
        "versions": versions(),
        "model": MODEL.name,
        "calibrated_on": calibration.info.model_dump(),
        "measured_on": held_out.info.model_dump(),
        "scored_tokens": next(iter(cache.values())).kl.numel(),
        "residual_share": next(iter(cache.values())).residual_share,
        "weights": {
            "methods": figures(weights, args.seed),
            "differences": differences(weights, WEIGHT_PAIRS, args.seed),
        },
        "cache": {"methods": figures(cache, args.seed), "differences": differences(cache, KV_PAIRS, args.seed)},
        "bytes": cache_bytes(model, held_out.ids),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main()
