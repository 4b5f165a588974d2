"""Low-bit keys and values of images on the reference vision-language model: CalibQuant and its ablations.

    python benchmarks/multimodal.py [--pairs N] [--seed S] [--output FILE] [--write README.md]

Prompts show two drawings that neither training nor calibration saw; see benchmarks/multimodal_measure.py for how they
are read. Spans go through the runtime's own cache; formats that it does not have (values per token or with one range
for all) are quantized and dequantized in place in transformers' cache and called "simulated". tau and ranges are
calibrated with calibration/calibquant.py on drawings of another seed, one pair of taus for all layers. Writes JSON;
`--write` puts the table into the README without measuring anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from multimodal_measure import (
    QUESTIONS,
    Answers,
    Bench,
    FakeFormat,
    Reader,
    attention_errors,
    fake_reader,
    span_read_back,
)
from transformers import AutoModelForImageTextToText, AutoProcessor, Cache, DynamicCache

from kvconvert.bundle.scheme import PRESETS, KVScheme
from kvconvert.calibration.calibquant import SPAN_RANGE_GRID, choose_taus, search_taus
from kvconvert.fidelity.bootstrap import bootstrap_mean
from kvconvert.fidelity.evaluate import versions
from kvconvert.kernels.spans import SpanFormat
from kvconvert.runtime import KVCache
from kvconvert.runtime.attention import NAME

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "reference-vlm"
RESULTS = ROOT / "benchmarks" / "results" / "multimodal.json"
BEGIN, END = "<!-- multimodal: written by benchmarks/multimodal.py -->", "<!-- end of multimodal -->"
# The script of the reference trains with seeds from 1,000,000 on and examines with 2,000,000.
HELD_OUT_SEED, CALIBRATION_SEED = 3_000_000, 4_000_000
SAMPLES = 8
TAUS = (0.0, 1.0, 2.0, 3.0)
BITS = (8, 4, 2, 1)
SPAN = KVScheme(key_granularity="span", value_granularity="span", modality="visual")
SEARCHES = {
    "tau": (TAUS, (1.0,)),
    "range": ((0.0,), SPAN_RANGE_GRID),
    "tau and range": (TAUS, SPAN_RANGE_GRID),
}


@dataclass(frozen=True)
class Setting:
    """One row: what it is called, how prompts are read, and how its attention errs.

    Attributes:
        name: of the row; group: what it is compared within, the bits or "pages".
        reader: reads prompts.
        read_back: per layer, what its spans give back; None for pages.
        taus: per layer.
        chosen: parameters for the record.
    """

    name: str
    group: str
    reader: Reader
    read_back: list[Callable] | None
    taus: list[tuple[float, float]]
    chosen: dict


def through_cache(name: str, group: str, bench: Bench, schemes: list[KVScheme]) -> Setting:
    config = bench.model.config

    def new_cache(visual: torch.Tensor) -> Cache:
        return KVCache(config, schemes)

    spans = schemes[0].is_span
    formats = [SpanFormat(s.key_bits, s.value_bits, s.key_range, s.value_range) for s in schemes] if spans else []
    chosen = (
        {f: [getattr(s, f) for s in schemes] for f in ("tau1", "tau2", "key_range", "value_range")} if spans else {}
    )
    return Setting(
        name,
        group,
        Reader(new_cache, NAME),
        [span_read_back(f) for f in formats] if spans else None,
        [(s.tau1, s.tau2) for s in schemes],
        chosen,
    )


def simulated(name: str, bits: int, keys: str, values: str, layers: int) -> Setting:
    f = FakeFormat(bits, keys, values)
    return Setting(name, f"{bits} bit", fake_reader(f, layers), [f.read_back] * layers, [(0.0, 0.0)] * layers, {})


def searched(samples: list, bits: int, taus: tuple[float, ...], ranges: tuple[float, ...]) -> list[KVScheme]:
    """Spans of so many bits with what calibration chooses: one pair of taus, ranges per layer."""
    tables = [search_taus(s, SpanFormat(bits, bits), taus, taus, ranges, ranges) for s in samples]
    row, column = choose_taus([t.error for t in tables], [t.output_error for t in tables])
    return [
        scheme(
            bits,
            tau1=taus[row],
            tau2=taus[column],
            key_range=float(t.key_range[row, column]),
            value_range=t.value_range,
        )
        for t in tables
    ]


def scheme(bits: int, **values: float) -> KVScheme:
    return KVScheme.from_dict(SPAN.to_dict() | {"key_bits": bits, "value_bits": bits} | values)


def settings(bench: Bench) -> list[Setting]:
    layers = bench.model.config.text_config.num_hidden_layers
    samples = bench.attention_samples(CALIBRATION_SEED, SAMPLES)
    rows = []
    for bits in BITS:
        group = f"{bits} bit"
        rows.append(through_cache("min and max", group, bench, [scheme(bits)] * layers))
        rows += [
            through_cache(name, group, bench, searched(samples, bits, *search)) for name, search in SEARCHES.items()
        ]
        if bits <= 2:
            rows.append(through_cache("tau of the released code", group, bench, [scheme(bits, tau2=3.0)] * layers))
        if bits == 1:
            released = {"key_range": 0.5, "value_range": 0.3}
            rows.append(through_cache("ranges of the released code", group, bench, [scheme(1, **released)] * layers))
            released["tau2"] = 3.0
            rows.append(through_cache("both of the released code", group, bench, [scheme(1, **released)] * layers))
        rows += [
            simulated("values per token", bits, "channel", "token", layers),
            simulated("values with one range", bits, "channel", "global", layers),
            simulated("keys and values with one range", bits, "global", "global", layers),
        ]
    for name in ("kivi", "oscar", "kitty"):
        rows.append(through_cache(name, "pages", bench, [PRESETS[name].with_online_rotation()] * layers))
    return rows


def measured(
    setting: Setting, bench: Bench, exact: tuple[Answers, Answers], samples: list, seed: int
) -> tuple[dict, torch.Tensor]:
    """The row's figures, and its mean KL for each pair."""
    answers = bench.answers(setting.reader)
    kl = answers.divergence(exact[0])
    each = answers.by_pair(kl)
    interval = bootstrap_mean(each, seed)
    captions = bench.captions(setting.reader)
    caption_kl = captions.divergence(exact[1])
    row = {
        "group": setting.group,
        "simulated": setting.reader.attention != NAME,
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
    if setting.read_back is not None:
        row["weights_error"], row["output_error"] = attention_errors(samples, setting.read_back, setting.taus)
    return row, each


def report(bench: Bench, args: argparse.Namespace) -> dict:
    full = Reader(lambda _: DynamicCache(config=bench.model.config))
    exact = answers, captions = bench.answers(full), bench.captions(full)
    samples = bench.attention_samples(HELD_OUT_SEED, SAMPLES)
    result: dict = {
        "command": f"python benchmarks/multimodal.py --pairs {args.pairs} --seed {args.seed} --threads {args.threads}",
        "seed": args.seed,
        "versions": versions(),
        "model": "examples/reference-vlm",
        "held_out": {"seed": HELD_OUT_SEED, "pairs": args.pairs, "questions": args.pairs * QUESTIONS},
        "calibration": {"seed": CALIBRATION_SEED, "drawings": SAMPLES},
        "answer_tokens": len(answers.pair),
        "caption_tokens": len(captions.pair),
        "full_precision": {
            "exact_answers": sum(answers.exact) / len(answers.exact),
            "exact_captions": sum(captions.exact) / len(captions.exact),
        },
        "rows": {},
        "better_by": {},
    }
    each: dict[tuple[str, str], torch.Tensor] = {}
    for setting in settings(bench):
        key = (setting.group, setting.name)
        row, each[key] = measured(setting, bench, exact, samples, args.seed)
        result["rows"][f"{setting.group}, {setting.name}"] = row
        print(f"{setting.group}, {setting.name}: {json.dumps(row)}", file=sys.stderr, flush=True)
    for (group, name), values in each.items():
        base = each.get((group, "min and max"))
        if base is not None and name != "min and max":
            gain = bootstrap_mean(base - values, args.seed)
            result["better_by"][f"{group}, {name}"] = {"mean": gain.mean, "low": gain.low, "high": gain.high}
    return result


def markdown(result: dict) -> str:
    full = result["full_precision"]
    lines = [
        "| drawings' keys and values | bits per value | error of weights | exact answers | KL | KL, 99 % "
        "| exact captions | KL |",
        "|---|---|---|---|---|---|---|---|",
        f"| full precision | 16 | 0 | {share(full['exact_answers'])} | 0 | 0 | {share(full['exact_captions'])} | 0 |",
    ]
    for name, row in result["rows"].items():
        bits, error = row["bits_per_visual_value"], row.get("weights_error")
        cells = (
            name + (" (simulated)" if row["simulated"] else ""),
            f"{bits:.2f}" if bits else "",
            f"{error:.4f}" if error is not None else "",
            share(row["exact_answers"]),
            f"{row['kl']:.4f}",
            f"{row['kl_p99']:.3f}",
            share(row["exact_captions"]),
            f"{row['caption_kl']:.4f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def write(result: dict, readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    head = (
        f"`{result['command']}`: {result['held_out']['questions']} questions, {result['answer_tokens']} answer tokens."
    )
    readme.write_text(f"{before}{BEGIN}\n{head}\n\n{markdown(result)}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0, help="of the confidence intervals")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--write", type=Path, metavar="README", help="only put the table of OUTPUT into this file")
    args = parser.parse_args()
    if args.write:
        write(json.loads(args.output.read_text(encoding="utf-8")), args.write)
        return
    torch.set_num_threads(args.threads)
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32).eval()
    bench = Bench(model, AutoProcessor.from_pretrained(args.model), HELD_OUT_SEED, args.pairs)
    result = report(bench, args)
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
