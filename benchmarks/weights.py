"""The loss by quantized weights, the cache left alone: KL and perplexity of every method and width.

    python benchmarks/weights.py MODEL --text DIR [--only CASE ...]

MODEL is the directory of a dense model; DIR holds the text reported on, by default wikitext2-test.txt; the name python
is the running Python's standard library, and `--name wikitext2-test python` reports on both. A CASE is a method with
changes: `awq+gptq:bits=3,group_size=32,samples=128`; with `corrected=false` compensation makes up for a Linear's own
rounding alone. `llm-compressor/gptq:bits=3` and `GPTQModel/gptaq` are other programs' methods, each run by the Python
that `--peer-python PROGRAM=PYTHON` names, on the same token ids. Every case is calibrated by the passes that `kvconvert
calibrate` runs, on text that ships with kvconvert, on --calibration, or on its own `texts=books-calib+wikitext2-valid`
(names of .txt files in DIR, in equal shares), never on what is reported on; its weights are then rounded and put back
into the model, so that widths which bundles do not hold can be measured too. Logits are compared with the source's in
float32. Rows that the output holds already, measured in the same way, are kept.

One H200 measures 12 cases of SmolLM2-135M with --jobs 8 in about three minutes: most of that is launching.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from real_model_bench import CODE, library_text
from runner import RESULTS, ROOT, option_parser, read, save
from transformers import AutoTokenizer
from weights_docs import methods
from weights_measure import Case, SourceScores, peer_model, quantized_model

from kvconvert.data.text import spaced_samples
from kvconvert.errors import KvconvertError
from kvconvert.fidelity.evaluate import versions

OUTPUT = RESULTS / "weights.json"
METHODS = ("rtn", "awq", "gptq", "awq+gptq")


def arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, metavar="DIR", help="of the text reported on")
    parser.add_argument(
        "--name",
        nargs="+",
        default=["wikitext2-test"],
        help="of its .txt file, or python, or both (default: wikitext2-test)",
    )
    parser.add_argument("--calibration", metavar="SOURCE", help="text that weights are calibrated on")
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", help="cases to measure (default: every method at 4, 3 and 2 bits)"
    )
    parser.add_argument("--group-size", type=int, default=64, help="where a case says none (default: 64)")
    parser.add_argument("--segments", type=int, default=16, help="of the text (default: 16)")
    parser.add_argument("--length", type=int, default=1024, help="scored tokens of a segment (default: 1024)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, in processes of their own")
    parser.add_argument("--peer-python", nargs="+", default=[], metavar="PROGRAM=PYTHON", help="of other programs")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "weights", help="of the source's logits")
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    args.peer_python = dict(named.split("=", 1) for named in args.peer_python)
    if len({name for name in args.name if name != CODE}) > 1:
        parser.error("give --name one .txt file at a time")
    return args


def source_scores(args: argparse.Namespace, name: str) -> SourceScores:
    """The source's outputs for a text: the first call computes it, later ones find its files."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    file = library_text(args.work) if name == CODE else args.text / f"{name}.txt"
    ids = spaced_samples(str(file), tokenizer, args.segments, args.length + 1)
    return SourceScores(args.model, ids, args.work, args.device)


@torch.no_grad()
def row(args: argparse.Namespace, case: Case, names: list[str]) -> dict[str, dict[str, Any]]:
    """One case's figures on each text, or {"failure": reason} as that of ""."""
    torch.set_num_threads(args.threads)
    begun = time.monotonic()
    try:
        data = [str(args.text / f"{name}.txt") for name in case.texts] or args.calibration
        if case.peer:
            python = Path(args.peer_python[case.peer.partition("/")[0]])
            quantized = peer_model(args.model, case, data, args.seed, args.device, python, args.threads)
        else:
            quantized = quantized_model(args.model, case, data, args.seed, args.device)
    except KvconvertError as error:
        return {"": {"failure": str(error)}}
    measured = {"case": case.values(), "seconds": round(time.monotonic() - begun)}
    return {name: source_scores(args, name).compare(quantized) | measured for name in names}


def rows(
    args: argparse.Namespace, cases: dict[str, tuple[Case, list[str]]]
) -> Iterator[tuple[Case, dict[str, dict[str, Any]]]]:
    """The cases' figures as they come."""
    if args.jobs < 2:
        yield from ((case, row(args, case, names)) for case, names in cases.values())
        return
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = {pool.submit(row, args, case, names): case for case, names in cases.values()}
        for done in as_completed(found):
            yield found[done], done.result()


def measured_on(args: argparse.Namespace, text: str, models: dict[str, Any]) -> dict[str, Any]:
    """The report's entry of the model on a text, and what it holds already if that was measured in the same way."""
    settings = {
        "text": text,
        "segments": args.segments,
        "scored_per_segment": args.length,
        "seed": args.seed,
        "device": args.device,
        "calibrated_on": Path(args.calibration).name if args.calibration else "books-calib and code-calib",
    }
    name = args.model.resolve().name + (f", {CODE}" if text == CODE else "")
    if models.get(name, {"settings": settings})["settings"] != settings:
        print(f"{name} was measured otherwise; all of its rows are replaced.", file=sys.stderr)
        del models[name]
    model = models.setdefault(name, {"settings": settings, "cases": {}})
    model["source_perplexity"] = source_scores(args, text).perplexity
    return model


@torch.no_grad()
def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {"versions": versions(), "models": {}}
    if args.output.is_file():
        report["models"] = read(args.output)["models"]
    wanted = args.only or [f"{method}:bits={bits}" for bits in (4, 3, 2) for method in METHODS]
    cases = [Case.parse(text, args.group_size) for text in wanted]
    if unknown := {case.peer.partition("/")[0] for case in cases if case.peer} - args.peer_python.keys():
        sys.exit(f"--peer-python has to name the Python of {', '.join(sorted(unknown))}.")
    models, missing = {}, {}
    for text in args.name:
        models[text] = measured_on(args, text, report["models"])
        for case in cases:
            if args.again or case.name not in models[text]["cases"]:
                missing.setdefault(case.name, (case, []))[1].append(text)
    for case, found in rows(args, missing):
        for text, figures in found.items():
            if "failure" in figures:
                sys.exit(f"{case.name}: {figures['failure']}")
            models[text]["cases"][case.name] = figures
            kl = figures["kl"]["mean"]
            print(f"{case.name}: KL {kl:.4f} on {text}, {figures['seconds']} s", file=sys.stderr, flush=True)
        save(args.output, report)
    print(methods(report))


if __name__ == "__main__":
    main()
