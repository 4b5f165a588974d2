"""Low-bit keys and values of images on the reference vision-language model: CalibQuant and its ablations.

    python benchmarks/multimodal.py [--pairs N] [--seed S] [--only ROW ...]

Prompts show two drawings that neither training nor calibration saw; see benchmarks/multimodal_measure.py for how they
are read. Spans go through the runtime's own cache. tau and ranges are calibrated with calibration/calibquant.py on
drawings of another seed, one pair of taus for all layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from multimodal_measure import (
    QUESTIONS,
    Answers,
    Bench,
    Reader,
)
from runner import RESULTS, ROOT, option_parser, read, save
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache

from kvconvert.calibration.attention_sample import AttentionSample
from kvconvert.calibration.calibquant import SPAN_CLIP_RATIO_GRID, choose_taus, search_taus
from kvconvert.convert.export import export
from kvconvert.convert.pipeline import calibrate
from kvconvert.fidelity.bootstrap import bootstrap_mean
from kvconvert.fidelity.evaluate import versions
from kvconvert.kernels.spans import SpanFormat
from kvconvert.methods import PRESETS, KVScheme
from kvconvert.runtime import KVCache, load
from kvconvert.runtime.hf.attention import NAME
from kvconvert.tables import markdown_table as table

MODEL = ROOT / "examples" / "reference-vlm"
OUTPUT = RESULTS / "multimodal.json"
# The script of the reference trains with seeds from 1,000,000 on and examines with 2,000,000.
HELD_OUT_SEED, CALIBRATION_SEED = 3_000_000, 4_000_000
SAMPLES = 8
BUNDLE_SAMPLES = 16  # sequences of 512 tokens, about three drawings each
TAUS = (0.0, 1.0, 2.0, 3.0)
BITS = (8, 4, 2, 1)
SPAN = KVScheme(key_granularity="span", value_granularity="span", modality="visual")
# Rows of the table for users, with what they are called there.
SHOWN = {
    "8 bit, range": "8 bits",
    "4 bit, range": "4 bits",
    "2 bit, range": "2 bits, calibrated range",
    "1 bit, min and max": "1 bit, full range",
    "1 bit, range": "1 bit, calibrated range",
    "pages, oscar": "pages of all tokens, `oscar`",
}
SEARCHES = {
    "tau": (TAUS, (1.0,)),
    "range": ((0.0,), SPAN_CLIP_RATIO_GRID),
    "tau and range": (TAUS, SPAN_CLIP_RATIO_GRID),
}


@dataclass(frozen=True)
class Setting:
    """One row: how prompts are read.

    Attributes:
        reader: reads prompts.
        chosen: parameters for the record.
        bench: of the model that reads, where it is not the source.
    """

    reader: Reader
    chosen: dict
    bench: Bench | None = None


def through_cache(bench: Bench, schemes: list[KVScheme]) -> Setting:
    reader = Reader(lambda: KVCache(bench.model.config, schemes), NAME)
    return Setting(reader, parameters_of(schemes) if schemes[0].is_span else {})


def parameters_of(schemes: Sequence[KVScheme]) -> dict[str, list[float]]:
    """What calibration chooses, per layer."""
    return {
        name: [getattr(s, name) for s in schemes] for name in ("tau1", "tau2", "key_clip_ratio", "value_clip_ratio")
    }


class Plan:
    """Every row by (group, name), built when it is asked for, so that `--only` calibrates nothing else."""

    def __init__(self, bench: Bench, only: list[str] | None):
        self.bench, self.layers = bench, bench.model.config.text_config.num_hidden_layers
        self.rows: dict[tuple[str, str], Callable[[], Setting]] = {}
        for bits in BITS:
            self.add_width(bits, f"{bits} bit")
        for name in ("kivi", "oscar", "kitty"):
            self.rows["pages", name] = partial(self.cached, PRESETS[name].with_online_rotation())
        for preset in ("calibquant-2bit-visual", "calibquant-1bit-visual", "default"):
            self.rows["bundle", preset] = partial(self.bundle, preset)
        if only:
            wanted = {key for key in self.rows if any(", ".join(key).startswith(start) for start in only)}
            self.rows = {key: make for key, make in self.rows.items() if key in wanted}

    def add_width(self, bits: int, group: str) -> None:
        # The released code multiplies min and max by these factors; here they shrink about the midpoint.
        rows, fixed, released = (
            self.rows,
            partial(partial, self.cached),
            {"key_clip_ratio": 0.5, "value_clip_ratio": 0.3},
        )
        rows[group, "min and max"] = fixed(scheme(bits))
        for name in SEARCHES:
            rows[group, name] = partial(self.calibrated, bits, name)
        if bits <= 2:
            rows[group, "tau of the released code"] = fixed(scheme(bits, tau2=3.0))
        if bits == 1:
            rows[group, "released factors about the midpoint"] = fixed(scheme(1, **released))
            rows[group, "released factors and tau"] = fixed(scheme(1, **released, tau2=3.0))

    def cached(self, same: KVScheme) -> Setting:
        return through_cache(self.bench, [same] * self.layers)

    def calibrated(self, bits: int, search: str) -> Setting:
        return through_cache(self.bench, self.searched(bits, search))

    def bundle(self, preset: str) -> Setting:
        """What the command line makes of the reference: 4-bit weights and a cache calibrated on its own drawings."""
        with tempfile.TemporaryDirectory() as directory:
            work, bundle = Path(directory) / "work", Path(directory) / "bundle"
            calibrate(str(MODEL), work, recipe=preset, samples=BUNDLE_SAMPLES, progress=False)
            export(work, bundle, progress=False)
            model, processor = load(bundle, dtype=torch.float32)
        bench = Bench(model.eval(), processor, HELD_OUT_SEED, len(self.bench.pairs))
        return Setting(Reader(model.new_kv_cache, NAME), parameters_of(model.kv_schemes), bench)

    @cached_property
    def samples(self) -> list[AttentionSample]:
        return self.bench.attention_samples(CALIBRATION_SEED, SAMPLES)

    def searched(self, bits: int, search: str) -> list[KVScheme]:
        """Spans with what calibration chooses: one pair of taus, ranges per layer."""
        taus, ranges = SEARCHES[search]
        tables = [search_taus(s, SpanFormat(bits, bits), taus, taus, ranges, ranges) for s in self.samples]
        row, column = choose_taus([t.error for t in tables], [t.output_error for t in tables])
        pair = {"tau1": taus[row], "tau2": taus[column]}
        return [
            scheme(
                bits, **pair, key_clip_ratio=float(t.key_clip_ratio[row, column]), value_clip_ratio=t.value_clip_ratio
            )
            for t in tables
        ]


def scheme(bits: int, **values: float) -> KVScheme:
    return KVScheme.from_dict(SPAN.to_dict() | {"key_bits": bits, "value_bits": bits} | values)


def measured(setting: Setting, bench: Bench, exact: tuple[Answers, Answers], seed: int) -> dict:
    """The row's figures."""
    bench = setting.bench or bench
    answers = bench.answers(setting.reader)
    kl = answers.divergence(exact[0])
    interval = bootstrap_mean(answers.by_pair(kl), seed)
    captions = bench.captions(setting.reader)
    caption_kl = captions.divergence(exact[1])
    return {
        "kl": float(kl.mean()),
        "kl_by_pair": {"mean": interval.mean, "low": interval.low, "high": interval.high},
        "kl_p99": float(torch.quantile(kl, 0.99)),
        "exact_answers": sum(answers.exact) / len(answers.exact),
        "exact_captions": sum(captions.exact) / len(captions.exact),
        "caption_kl": float(caption_kl.mean()),
        "caption_kl_p99": float(torch.quantile(caption_kl, 0.99)),
        "bits_per_visual_value": answers.bits or None,
        **setting.chosen,
    }


def report(bench: Bench, args: argparse.Namespace) -> dict:
    full = Reader(lambda: DynamicCache(config=bench.model.config))
    exact = answers, captions = bench.answers(full), bench.captions(full)
    result: dict = {
        "command": f"python benchmarks/multimodal.py --pairs {args.pairs} --seed {args.seed} --threads {args.threads}",
        "seed": args.seed,
        "versions": versions(),
        "model": "examples/reference-vlm",
        "held_out": {"seed": HELD_OUT_SEED, "pairs": args.pairs, "questions": args.pairs * QUESTIONS},
        "calibration": {"seed": CALIBRATION_SEED, "drawings": SAMPLES, "bundle_sequences": BUNDLE_SAMPLES},
        "answer_tokens": len(answers.pair),
        "caption_tokens": len(captions.pair),
        "full_precision": {
            "exact_answers": sum(answers.exact) / len(answers.exact),
            "exact_captions": sum(captions.exact) / len(captions.exact),
        },
        "rows": {},
    }
    if args.only:
        recorded = read(args.output)
        result["rows"] = recorded["rows"]
    for (group, name), make in Plan(bench, args.only).rows.items():
        row = measured(make(), bench, exact, args.seed)
        result["rows"][f"{group}, {name}"] = {"group": group, **row}
        print(f"{group}, {name}: {json.dumps(row)}", file=sys.stderr, flush=True)
    order = [", ".join(key) for key in Plan(bench, None).rows]
    result["rows"] = {name: result["rows"][name] for name in order if name in result["rows"]}
    return result


def markdown(result: dict) -> str:
    """All rows, the source first."""
    full = result["full_precision"]
    rows = [("full precision", "", 16, share(full["exact_answers"]), 0, 0, share(full["exact_captions"]), 0)]
    rows += [
        (f"{row['group']}: {' = '.join(names)}", chosen(row), f"{row['bits_per_visual_value']:.2f}",
         share(row["exact_answers"]), f"{row['kl']:.2g}", f"{row['kl_p99']:.2g}", share(row["exact_captions"]),
         f"{row['caption_kl']:.2g}")
        for names, row in distinct(result["rows"])
    ]  # fmt: skip
    head = ("drawings' keys and values", "chosen", "bits per value", "exact answers", "KL", "KL, 99%")
    return table((*head, "exact captions", "KL"), rows)


def distinct(rows: dict[str, dict]) -> list[tuple[list[str], dict]]:
    """Rows with their names; those for which calibration chose the same parameters are one."""
    found: list[tuple[list[str], dict]] = []
    for name, row in rows.items():
        short = name.removeprefix(f"{row['group']}, ")
        same = [names for names, other in found if "tau1" in row and parameters(other) == parameters(row)]
        if same:
            same[0].append(short)
        else:
            found.append(([short], row))
    return found


def parameters(row: dict) -> tuple:
    return row["group"], *(row.get(name) for name in ("tau1", "tau2", "key_clip_ratio", "value_clip_ratio"))


def chosen(row: dict) -> str:
    """tau1 and tau2, and the ranges of keys and values from the smallest layer's to the largest's."""
    if "tau1" not in row:
        return ""
    parts = [f"tau {row['tau1'][0]:g}, {row['tau2'][0]:g}"] if any(row["tau1"] + row["tau2"]) else []
    for letter, values in (("K", row["key_clip_ratio"]), ("V", row["value_clip_ratio"])):
        if min(values) < 1:
            parts.append(f"{letter} {min(values):g}" + (f" to {max(values):g}" if max(values) > min(values) else ""))
    return "; ".join(parts)


def share(value: float) -> str:
    return f"{100 * value:.1f}%"


def tables(result: dict) -> str:
    """How it was measured, and all rows."""
    held_out = result["held_out"]
    head = (
        f"`{result['command']}`: {held_out['pairs']} pairs of drawings of seed {held_out['seed']:,}, "
        f"{held_out['questions']} questions with {result['answer_tokens']:,} tokens of answers, {held_out['pairs']} "
        f"captions with {result['caption_tokens']:,}; calibrated on drawings of seed {result['calibration']['seed']:,}."
    )
    return f"{head}\n\n{markdown(result)}"


def summary(result: dict) -> str:
    """What users need of it: exact answers by how image tokens are stored."""
    rows = [("full precision", "16", share(result["full_precision"]["exact_answers"]))]
    for name, label in SHOWN.items():
        row = result["rows"][name]
        rows.append((label, f"{row['bits_per_visual_value']:.2f}", share(row["exact_answers"])))
    return table(("image tokens", "bits per value", "exact answers"), rows)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0, help="of the confidence intervals")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="measure rows that begin so, and keep the others")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32).eval()
    bench = Bench(model, AutoProcessor.from_pretrained(args.model), HELD_OUT_SEED, args.pairs)
    result = report(bench, args)
    save(args.output, result)
    print(markdown(result))


if __name__ == "__main__":
    main()
