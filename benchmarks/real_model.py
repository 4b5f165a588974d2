"""Every cache preset on a real language model: text, numbers and values recalled, and bytes.

    python benchmarks/real_model.py MODEL --text DIR [CASE ...]

MODEL is a directory (`make real-model MODEL=NAME` makes one); DIR holds the texts reported on, by default
wikitext2-test.txt and books-val.txt, and the text `python` is read from the running Python's standard library. Caches
are calibrated on text that ships with kvconvert, or on --calibration, never on what is reported on. A CASE is a preset
with changes: `oscar-g128:key_bits=3,sink_tokens=8`; `auto:kv_bits=2.5` passes arguments of `calibrate`. Without --only,
the cases of docs/choosing.md are measured and those added; `make docs` then writes the pages.

Tables of caches have weights in full precision; bundles are calibrated with what `calibrate` takes without options,
samples included. Segments are evenly spaced over each text and read page by page from
token 160 on; caches that compress whole prompts read half of each segment, or --sealed-prompt tokens, as a sealed
prompt and are scored on the rest, and the baseline beside them. Every row is written when it is there. Rows that the
output holds already, measured in the same way, are kept.

--beside NAME,... (or `all`) searches `auto` at the measured bits of each of these caches, in one search. For one read
page by page they are the mean over the last 128 lengths, for how full the last page is differs with the number of sink
tokens; for one that compresses whole prompts they are those of such a prompt, and `auto` reads it in the same way: with
a prompt of whole pages, and at most 128 tokens scored, both keep what comes after it in full
precision. --length has to be of whole pages, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from real_model_bench import Bench, joined
from real_model_docs import RESULTS, cases_of, markdown

from kvconvert.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "default"
PRESETS = ("default", "kivi", "oscar", "oscar-g128", "kitty", "kitty-pro", "kivi:key_bits=4,value_bits=4")
BUDGETS = (2.62, 1.79, 3.19)  # of `auto`, in bits per value; complete pages alone have 2.43, 1.6 and 3.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--cases", dest="file", type=Path, metavar="FILE", help="of cases, one a line, # for comments")
    parser.add_argument("--beside", default="", metavar="NAME,...", help="search auto at the bytes of these, or of all")
    parser.add_argument("--auto-tokens", type=int, metavar="N", help="of calibration text, for searches")
    parser.add_argument(
        "--bundles", default="", metavar="CASE,...", help="recipes measured with their weights, as calibrate makes them"
    )
    parser.add_argument(
        "--baseline", default=BASELINE, help=f"case that others are compared with (default: {BASELINE})"
    )
    parser.add_argument("--segments", type=int, default=6, help="of each text (default: 6)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a segment (default: 4096)")
    parser.add_argument("--sealed-prompt", type=int, metavar="N", help="tokens (default: half of a segment)")
    parser.add_argument("--recall", default="1024,3072,7168", help='tokens of prose; "" for none')
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
        wanted = joined(args.only.split(",")) if args.only else [args.baseline, *PRESETS, *searches(args)]
        wanted += args.cases
        bundles = list(filter(None, args.bundles.split(",")))
        if args.file is not None:
            wanted += cases_of(args.file)
        bench = Bench(args)
        bench.measure_source()
        for names in (lambda: wanted, bench.sealed_beside, bench.searched_beside):
            bench.measure_caches(bench.missing(names(), "caches"))
        for name in bench.missing(joined(bundles), "bundles"):
            bench.measure(name, "bundles")
    except UsageError as error:
        sys.exit(f"Error: {error}")
    print(markdown(bench.report))


if __name__ == "__main__":
    main()
