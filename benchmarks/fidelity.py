"""The gain of each method on the reference model: weights (AWQ against rounding), cache (OScaR against KIVI).

    python benchmarks/fidelity.py [--text FILE] [--segments N] [--output FILE]

Parameters are chosen on one text (books-calib), figures reported on another (books-val): KL to the full-precision model
in nats, over continuation tokens scored through the cache. Methods see the same segments; an interval is the 95 %
bootstrap over segments of the paired difference. Writes JSON, which `make docs` shows in
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import copy
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from runner import RESULTS, ROOT, option_parser, save
from tables import signed
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from kvconvert.calibration.activations import ActivationRecorder, ActivationStatistics
from kvconvert.calibration.awq_scales import search_scales
from kvconvert.calibration.awq_scaling import apply_clips, apply_scales, search_clips
from kvconvert.convert.discovery import discover
from kvconvert.convert.layer_runner import build_without_weights
from kvconvert.data.sources import EVALUATION
from kvconvert.data.text import load_token_samples
from kvconvert.fidelity.evaluate import text_figures, versions
from kvconvert.fidelity.scoring import Comparison, Decoder, Interval, bootstrap_mean, compare
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.models.structure import LayerStructure
from kvconvert.runtime import KVCache
from kvconvert.tables import markdown_table as table

MODEL = ROOT / "examples" / "reference-lm"
OUTPUT = RESULTS / "fidelity.json"
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
# With everything that the searches see dealt to the wrong channels, as if calibrated on another model.
SHUFFLED = "AWQ, shuffled activations"
WEIGHT_METHODS = ("rtn", "AWQ", SHUFFLED)
# (label, worse, better): positive differences say that the second has the lower KL.
WEIGHT_PAIRS = [
    (f"{bits} bits: {worse} - AWQ", f"{worse} ({bits} bits)", f"AWQ ({bits} bits)")
    for bits in WEIGHT_BITS
    for worse in ("rtn", SHUFFLED)
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


def shuffled(observed: ActivationStatistics, structure: LayerStructure, seed: int) -> ActivationStatistics:
    """Activations with permuted channels: whole groups, and channels within, so that second moments stay blocks."""
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
    return replace(observed, mean_abs=mean_abs, second_moment=moments, tokens=tokens, sequences=sequences)


@torch.no_grad()
def quantized(
    model: LlamaForCausalLM, structure: LayerStructure, bits: int, seen: list[ActivationStatistics] | None
) -> LlamaForCausalLM:
    """A copy with fake-quantized Linears, searched by AWQ on what was `seen`, if anything was.

    Norms are rounded to bf16, as a conversion would store them.
    """
    model = copy.deepcopy(model)
    for index, layer in enumerate(model.model.layers):
        scalings, clips = [], {}
        if seen is not None:
            scalings, _ = search_scales(layer, structure, seen[index], bits, WEIGHT_GROUP, dtype=torch.bfloat16)
            clips = search_clips(layer, structure, seen[index], scalings, bits, WEIGHT_GROUP)
        apply_scales(layer, structure, scalings, torch.bfloat16)
        apply_clips(layer, clips, WEIGHT_GROUP)
        for name in structure.linears:
            weight = layer.get_submodule(name).weight
            weight.copy_(fake_quantize_weight(weight, bits, WEIGHT_GROUP))
    return model


def weight_variants(model: LlamaForCausalLM, ids: torch.Tensor, seed: int) -> dict[str, Decoder]:
    """Fake-quantized models by name; the searches are given ids [samples, length], nothing of the text reported on."""
    structure = discover(build_without_weights(model.config)).structures[0]
    observed = observe(model, structure, ids)
    wrong = [shuffled(layer, structure, seed + index) for index, layer in enumerate(observed)]
    seen = dict(zip(WEIGHT_METHODS, (None, observed, wrong), strict=True))
    jobs = [(bits, name) for bits in WEIGHT_BITS for name in WEIGHT_METHODS]
    return {
        f"{name} ({bits} bits)": Decoder.plain(quantized(model, structure, bits, seen[name]))
        for bits, name in tqdm(jobs, desc="quantizing weights")
    }


def cache_variants(model: LlamaForCausalLM) -> dict[str, Decoder]:
    """The unconverted model with each scheme's cache; what a bundle folds is done at run time."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("kvconvert")

    def make(scheme: KVScheme):
        return lambda: KVCache(model.config, scheme.with_online_rotation())

    return {name: Decoder(model, make(scheme)) for name, scheme in SCHEMES.items()}


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


def tables(report: dict) -> str:
    """How it was measured, and the tables."""
    about = (
        f"`{report['command']}`, torch {report['versions']['torch']}: {report['scored_tokens']:,} scored tokens; while "
        f"caches were scored, {report['residual_share']:.0%} of the attended tokens were in full precision."
    )
    parts = [about]
    for part, title in (("weights", "weights"), ("cache", "KV cache, 2 bits")):
        methods = report[part]["methods"]
        source = next(iter(methods.values()))["perplexity"]["source"]
        rows = [("full precision", 0, 0, f"{source:.2f}", "100%")]
        rows += [
            (name, f"{row['kl']['mean']:.4f}", f"{row['kl']['p99']:.3f}", f"{row['perplexity']['bundle']:.2f}",
             f"{row['top1_agreement']:.1%}")
            for name, row in methods.items()
        ]  # fmt: skip
        parts.append(table((title, "KL", "99%", "perplexity", "same first token"), rows))
        found = report[part]["differences"].items()
        rows = [(name, signed(Interval(row["mean"], row["low"], row["high"]))) for name, row in found]
        parts.append(table(("paired difference in KL", "mean (95% interval)"), rows))
    return "\n\n".join(parts)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--text", help="held-out text to report on (default: the excerpt that ships with kvconvert)")
    parser.add_argument("--segments", type=int, default=24, help=f"segments of {SEGMENT_TOKENS} tokens (default: 24)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of torch; results depend on it in the last digits")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    calibration = load_token_samples("kvconvert:books-calib.txt", tokenizer, *CALIBRATION, args.seed)
    held_out = load_token_samples(args.text or EVALUATION, tokenizer, args.segments, SEGMENT_TOKENS, args.seed)
    source = Decoder.plain(model)
    # Full-precision caches do not care how the text is cut into chunks; one is the fastest.
    whole = {"chunk": SEGMENT_TOKENS, "batch": 1, "progress": True}
    weights = compare(source, weight_variants(model, calibration.ids, args.seed), held_out.ids, **whole)
    caches = cache_variants(model)
    cache = compare(source, caches, held_out.ids, PAGE_SIZE, progress=True)
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
    }
    save(args.output, report)
    print(tables(report))


if __name__ == "__main__":
    main()
