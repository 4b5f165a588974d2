"""Every cache preset on a real language model: text, numbers and values retrieved, and bytes.

    python benchmarks/real_model.py MODEL --text DIR [CASE ...]

MODEL is a directory (`make real-model MODEL=NAME` makes one); DIR holds the texts reported on, by default
wikitext2-test.txt and books-val.txt, and the text `python` is read from the running Python's standard library. Caches
are calibrated on text that ships with kvconvert, or on --calibration, never on what is reported on. A CASE is a preset
with changes: `oscar-g128:key_bits=3,sink_tokens=8`; `auto:kv_bits=2.5` passes arguments of `calibrate`. Without --only,
the cases of docs/choosing.md are measured and those added; `make docs` then writes the pages.

Weights are in full precision. Segments are evenly spaced over each text and read page by page from token 160 on. Every
row is written when it is there. Rows that the output holds already, measured in the same way, are kept. Caches that
compress whole prompts are in benchmarks/PAPERS.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from real_model_bench import Bench, joined
from real_model_docs import markdown
from runner import RESULTS, ROOT, option_parser

from kvconvert.errors import UsageError

PRESETS = ("default", "kivi", "oscar", "oscar-g128", "kitty", "kitty-pro", "kivi:key_bits=4,value_bits=4")
BUDGETS = (2.62, 1.79, 3.19)  # of `auto`, in bits per value; complete pages alone have 2.43, 1.6 and 3.0


def arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="measured beside the others")
    parser.add_argument("--text", type=Path, required=True, metavar="DIR", help="of the texts reported on")
    parser.add_argument(
        "--texts",
        default="wikitext2-test,python,books-val",
        help="names of .txt files, or `python`; the last is the prose that numbers are hidden in",
    )
    parser.add_argument("--calibration", metavar="SOURCE", help="text that caches are calibrated on")
    parser.add_argument("--only", metavar="NAME,...", help="measure these cases, and keep the other rows")
    parser.add_argument("--auto-tokens", type=int, metavar="N", help="of calibration text, for searches")
    parser.add_argument("--segments", type=int, default=6, help="of each text (default: 6)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a segment (default: 4096)")
    parser.add_argument("--retrieval", default="1024,3072,7168", help='tokens of prose; "" for none')
    parser.add_argument("--json", default="40,150", metavar="PAIRS,...", help='of JSON objects; "" for none')
    parser.add_argument("--prompts", type=int, default=32, help="of each length (default: 32)")
    parser.add_argument("--batch", type=int, help="rows at a time (default: 32 on a GPU, 4 on a CPU)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calibrate-on", metavar="DEVICE", help="default: --device's")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="of calibrations (default: build/real-model/MODEL)")
    parser.add_argument("--jobs", type=int, help="cases at a time (default: 4 on a GPU, 1 on a CPU)")
    parser.add_argument("--again", action="store_true", help="calibrate and measure anew what is there already")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/real_model_MODEL.json")
    args = parser.parse_args()
    name = args.model.resolve().name
    args.work = args.work or ROOT / "build" / "real-model" / name
    if args.output is None:
        args.output = RESULTS / f"real_model_{name}.json"
    return args


def searches(args: argparse.Namespace) -> list[str]:
    """`auto` at the budgets of the page, for segments of the length that is measured."""
    options = f",context={args.length}"
    options += "" if args.auto_tokens is None else f",auto_tokens={args.auto_tokens}"
    return [f"auto:kv_bits={bits}{options}" for bits in BUDGETS]


def main() -> None:
    args = arguments()
    try:
        # Changes are separated by commas, too: a part without a preset of its own goes on with the one before.
        wanted = joined(args.only.split(",")) if args.only else [*PRESETS, *searches(args)]
        wanted += args.cases
        bench = Bench(args)
        bench.measure_source()
        bench.measure_caches(bench.missing(wanted))
    except UsageError as error:
        sys.exit(f"Error: {error}")
    print(markdown(bench.report))


if __name__ == "__main__":
    main()
