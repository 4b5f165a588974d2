"""Convert the reference model and show what that does: commands, text before and after, fidelity, memory.

    python examples/quickstart.py                      run everything and print it
    python examples/quickstart.py --write docs/quickstart.md    also put the output between the page's markers
    python examples/quickstart.py --check docs/quickstart.md    also compare its figures with the page's

No network is needed: the model and the text lie in this repository.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "examples/reference-lm"
OUT = "quickstart-out"
WORK, BUNDLE = f"{OUT}/work", f"{OUT}/bundle"
COMMANDS = (
    ("calibrate", MODEL, "-o", WORK),
    ("export", WORK, "-o", BUNDLE),
    ("verify", BUNDLE),
    ("eval", BUNDLE, "--against", MODEL, "--full", "--json"),
)
PROMPT = "It was a dark night, and the old house stood"
BEGIN, END = "<!-- quickstart: written by `make quickstart-page` -->", "<!-- end of quickstart -->"
# Relative difference from the page's figures that --check allows: other processors round differently, and 4-bit
# codes and greedy answers amplify it. The weights' size does not depend on it; the cache's does by the bits
# of norms, where two treatments of a layer's keys are measured to be as good.
TOLERANCE = {"perplexity": 0.02, "KL": 0.15, "agreement": 0.35, "retrieval": 0.35, "cache": 0.01, "bytes": 0.0}


def run(*command: str) -> str:
    """Run one kvconvert command, shown as a user would type it, and return what it prints."""
    print("$ " + shlex.join(["kvconvert", *command]), flush=True)
    program = [sys.executable, "-m", "kvconvert", *command]
    return subprocess.run(program, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def continuation(directory: str) -> str:
    """Forty greedy tokens after the prompt, by the source model or by a bundle."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvconvert.runtime  # noqa: F401  (makes from_pretrained read bundles)

    tokenizer = AutoTokenizer.from_pretrained(ROOT / directory)
    model = AutoModelForCausalLM.from_pretrained(ROOT / directory)
    ids = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**ids, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(tokens[0])


def table(report: dict) -> list[tuple[str, str, str, str]]:
    """Rows of (kind for the tolerance, measure, source, bundle)."""
    kv, weights = report["kv"], report["weights"]

    def percent(x: float) -> str:
        return f"{100 * x:.0f}%"

    return [
        (
            "perplexity",
            "perplexity, held-out novels",
            f"{report['perplexity']['source']:.2f}",
            f"{report['perplexity']['bundle']:.2f}",
        ),
        ("KL", "KL divergence from the source, mean", "0", f"{report['kl']['mean']:.4f}"),
        ("agreement", "same most likely token", "100%", percent(report["top1_agreement"])),
        ("retrieval", "retrieval", percent(report["retrieval"]["source"]), percent(report["retrieval"]["bundle"])),
        ("cache", "KV cache, bytes per token", f"{kv['source_bytes_per_token']:,.0f}", f"{kv['bytes_per_token']:,.0f}"),
        ("bytes", "weights, bytes", f"{weights['source_bytes']:,}", f"{weights['bytes']:,}"),
    ]


def quickstart() -> tuple[str, list[tuple[str, str, str, str]]]:
    """Convert, evaluate, generate; returns the page's block and its rows."""
    shutil.rmtree(ROOT / OUT, ignore_errors=True)
    begun = time.monotonic()
    report = json.loads([run(*command) for command in COMMANDS][-1])
    rows = table(report)
    lines = ["```console", *("$ " + shlex.join(["kvconvert", *command]) for command in COMMANDS), "```", ""]
    lines += ["| | source (bf16) | bundle |", "|---|---|---|"]
    lines += [f"| {measure} | {source} | {converted} |" for _, measure, source, converted in rows]
    lines += ["", "What it is fit for, as the same report says:", "", f"> {report['verdict']}"]
    lines += ["", "Greedy continuation of the source, then of the bundle:", ""]
    for directory in (MODEL, BUNDLE):
        lines += ["> " + " ".join(continuation(directory).split()), ""]
    block = "\n".join(lines)
    print("\n" + block)
    print(f"Converted, verified and evaluated in {time.monotonic() - begun:.0f} s; the bundle is in {BUNDLE}.")
    return block, rows


def compare(page: Path, rows: list[tuple[str, str, str, str]]) -> list[str]:
    """Figures that differ from the page's by more than the tolerance, one sentence each."""

    def number(text: str) -> float:
        return float(re.sub(r"[ ,%]", "", text))

    written = page.read_text(encoding="utf8")
    wrong = []
    for kind, measure, source, converted in rows:
        found = re.search(rf"^\| {re.escape(measure)} \| (.*?) \| (.*?) \|$", written, re.MULTILINE)
        if not found:
            wrong.append(f"{page.name} has no row {measure!r}.")
            continue
        for what, now, then in zip(("source", "bundle"), (source, converted), found.groups(), strict=True):
            if abs(number(now) - number(then)) > TOLERANCE[kind] * abs(number(then)):
                wrong.append(f"{measure}, {what}: {page.name} says {then}, measured {now}.")
    return wrong


def main() -> None:
    """Run, and write or check if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="also put the output between the page's markers")
    parser.add_argument("--check", type=Path, metavar="PAGE", help="also compare the page's figures with these")
    args = parser.parse_args()
    for page in filter(None, (args.write, args.check)):  # before minutes of work
        if not page.is_file():
            parser.error(f"{page} is no file; give a page that exists")
    text = args.write.read_text(encoding="utf8") if args.write else ""
    if args.write and (BEGIN not in text or END not in text):
        sys.exit(f"{args.write} has no quickstart markers; add the lines {BEGIN} and {END}.")
    block, rows = quickstart()
    if args.write:
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        args.write.write_text(f"{head}{BEGIN}\n{block}{END}{tail}", encoding="utf8")
    if args.check and (wrong := compare(args.check, rows)):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
