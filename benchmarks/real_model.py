"""Every cache preset on a real language model: text, numbers recalled, and bytes.

    python benchmarks/real_model.py MODEL --text DIR [CASE ...]

MODEL is a directory (`make real-model` fetches SmolLM2-135M-Instruct); DIR holds the texts reported on, by default
wikitext2-test.txt and books-val.txt. Caches are calibrated on text that ships with kvconvert, or on --calibration,
never on what is reported on. A CASE is a preset with changes: `oscar-g128:key_bits=3,sink_tokens=8`; `auto:kv_bits=2.5`
passes arguments of `calibrate`. Without --only, all presets are measured and the cases added.

Tables of caches have weights in full precision. Segments are evenly spaced over each text and read page by page from
token 160 on; caches that compress whole prompts read half of each segment, or --sealed-prompt tokens, as a sealed
prompt and are scored on the rest, and the baseline beside them. Rows that the output holds already, measured in the
same way, are kept; `benchmarks/real_model_merge.py` puts rows of several outputs together.

--beside NAME,... (or `all`) searches `auto` at the measured bits of each of these caches, in one search. For one read
page by page they are the mean over the last 128 lengths, for how full the last page is differs with the number of sink
tokens; for one that compresses whole prompts they are those of such a prompt, and `auto` reads it in the same way: with
a prompt of whole pages after 4 sink tokens, and at most 128 tokens scored, both keep what comes after it in full
precision. --length has to be of whole pages after 4 sink tokens, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from real_model_bench import Bench, joined
from real_model_docs import BASELINES, cases_of, write_page

from kvconvert.errors import UsageError
from kvconvert.methods import PRESETS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "real_model.json"
PAGE = ROOT / "docs" / "real-model.md"
BASELINE = "oscar-g128"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="measured beside the presets")
    parser.add_argument("--text", type=Path, required=True, metavar="DIR", help="of the texts reported on")
    parser.add_argument(
        "--texts", default="wikitext2-test,books-val", help="names of .txt files; the last is the prose"
    )
    parser.add_argument("--calibration", metavar="SOURCE", help="text that caches are calibrated on")
    parser.add_argument("--only", metavar="NAME,...", help="measure these cases, and keep the other rows")
    parser.add_argument("--cases", dest="file", type=Path, metavar="FILE", help="of cases, one a line, # for comments")
    parser.add_argument("--beside", default="", metavar="NAME,...", help="search auto at the bytes of these, or of all")
    parser.add_argument("--auto-tokens", type=int, metavar="N", help="of calibration text, for --beside")
    parser.add_argument("--bundles", default="default", metavar="CASE,...", help='recipes with weights; "" for none')
    parser.add_argument(
        "--baseline", default=BASELINE, help=f"case that others are compared with (default: {BASELINE})"
    )
    parser.add_argument("--segments", type=int, default=6, help="of each text (default: 6)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a segment (default: 4096)")
    parser.add_argument("--sealed-prompt", type=int, metavar="N", help="tokens (default: half of a segment)")
    parser.add_argument("--recall", default="1024,3072,7168", help='tokens of prose; "" for none')
    parser.add_argument("--prompts", type=int, default=32, help="of each length (default: 32)")
    parser.add_argument("--batch", type=int, help="rows at a time (default: 32 on a GPU, 4 on a CPU)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "real-model", help="of calibrations")
    parser.add_argument("--jobs", type=int, help="cases at a time (default: 4 on a GPU, 1 on a CPU)")
    parser.add_argument("--again", action="store_true", help="calibrate and measure anew what is there already")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--page",
        type=Path,
        help=f"Markdown to write; {PAGE.relative_to(ROOT)} with --output's default, "
        "without the rows of benchmarks/baselines.txt, which docs/choosing.md shows",
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        wanted = args.only.split(",") if args.only else [*PRESETS, *args.cases]
        bundles = [] if args.only else list(filter(None, args.bundles.split(",")))
        if args.only:
            # Changes are separated by commas, too: a part without a preset of its own goes on with the one before.
            wanted = joined(wanted) + list(args.cases)
        if args.file is not None:
            wanted += cases_of(args.file)
        bench = Bench(args)
        bench.measure_source()
        for names in (lambda: [args.baseline, *wanted], bench.sealed_beside, bench.searched_beside):
            missing = bench.missing(names(), "caches")
            bench.calibrate(missing)
            bench.measure_caches(missing)
        bench.shop.restart = args.again  # caches are calibrated by now, bundles are not
        for name in bench.missing(joined(bundles), "bundles"):
            bench.measure(name, "bundles")
    except UsageError as error:
        sys.exit(f"Error: {error}")
    page = args.page or (PAGE if args.output == RESULTS else None)
    print(write_page(bench.report, page, cases_of(BASELINES) if page == PAGE else ()))


if __name__ == "__main__":
    main()
