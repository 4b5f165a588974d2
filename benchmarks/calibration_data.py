"""How much calibration data AWQ needs, and what text unlike the one that is served costs: AWQ's figure 8.

    python benchmarks/calibration_data.py --text DIR [--samples 4 16 64 128] [--segments 6] [--tokens 512]

DIR holds books-calib.txt (novels), wikitext2-valid.txt and tinystories-val.txt, on which the reference model's weights
are quantized to 4 bits by AWQ, and wikitext2-test.txt and books-val.txt, on which the result is reported. Sizes vary on
novels, the text's domain at 64 sequences of 512 tokens. Logits are compared with the source's in float32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from weights_measure import LENGTH, Case, SourceScores, quantized_model

from kvconvert.data.text import spaced_samples
from kvconvert.fidelity.evaluate import versions

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "reference-lm"
RESULTS = ROOT / "benchmarks" / "results" / "calibration_data.json"
CALIBRATION = {"novels": "books-calib", "WikiText": "wikitext2-valid", "stories": "tinystories-val"}
REPORTED = {"WikiText": "wikitext2-test", "novels": "books-val"}
DEFAULT_SAMPLES = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, metavar="DIR")
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128])
    parser.add_argument("--segments", type=int, default=6, help="of each text reported on")
    parser.add_argument("--tokens", type=int, default=512, help="scored in a segment")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    return parser.parse_args()


def table(cases: list[dict[str, Any]]) -> str:
    """Markdown: one row for each calibration, the KL of each text with its 95% interval."""
    lines = [f"| calibrated on | sequences | {' | '.join(f'KL on {name}' for name in REPORTED)} |"]
    lines.append("|---|---|" + "---|" * len(REPORTED))
    for case in cases:
        cells = [f"{kl['mean']:.4f} ({kl['low']:.4f} to {kl['high']:.4f})" for kl in case["kl"].values()]
        lines.append(f"| {case['calibration']} | {case['samples'] or ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


@torch.no_grad()
def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvconvert-calibration-") as work:
        scores = {}
        for name, file in REPORTED.items():
            ids = spaced_samples(str(args.text / f"{file}.txt"), tokenizer, args.segments, args.tokens + 1)
            scores[name] = SourceScores(MODEL, ids, Path(work), "cpu")
        wanted = [("rtn", "none: rounded to nearest", None, 0)]
        wanted += [("awq", "novels", CALIBRATION["novels"], n) for n in sorted({*args.samples, DEFAULT_SAMPLES})]
        wanted += [("awq", name, file, DEFAULT_SAMPLES) for name, file in CALIBRATION.items() if name != "novels"]
        for method, name, file, samples in wanted:
            case = Case.parse(f"{method}:samples={samples or DEFAULT_SAMPLES}", 64)
            calibration = None if file is None else str(args.text / f"{file}.txt")
            model = quantized_model(MODEL, case, calibration, 0, "cpu")
            found = {text: source.compare(model)["kl"] for text, source in scores.items()}
            cases.append({"calibration": name, "samples": samples, "kl": found})
            print(name, samples, {text: round(kl["mean"], 5) for text, kl in found.items()}, flush=True)
            report = {
                "setting": {"length": LENGTH, "segments": args.segments, "tokens": args.tokens, "seed": 0},
                "versions": versions(),
                "cases": cases,
            }
            RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(cases))


if __name__ == "__main__":
    main()
