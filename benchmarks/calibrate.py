"""kvconvert beside llm-compressor: time, memory and what the quantized weights cost the model.

    python benchmarks/calibrate.py MODEL --peer-python PYTHON --text DIR [--samples 32 --length 512] [--rounds 1]
    python benchmarks/calibrate.py --shape 8b --layers 4 --samples 64 --peer-python PYTHON --device cuda

PYTHON is the interpreter of an environment with llm-compressor. Both programs quantize weights alone, asymmetrically
in the same groups and on the same token ids, with their defaults otherwise; llm-compressor's batches and dtype can be
chosen. Each run is a fresh process, imports, reading and saving included (kvconvert: `convert`), and the
programs take turns. Recorded are wall and processor time and the largest anonymous resident memory, as in
benchmarks/memory.py, and what the imports alone take; files of both programs are in memory before the first round.
With --text, what each has saved is read back, dequantized in float32, and compared with the source in float32.
--shape makes random weights instead, of which only time and memory mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from calibrate_measure import Settings, import_seconds, run, saved_model
from memory import SHAPES, write_checkpoint
from safetensors.torch import save_file
from transformers import AutoTokenizer
from weights_docs import beside_peers
from weights_measure import SourceScores

from kvconvert.data.text import load_token_samples, spaced_samples
from kvconvert.fidelity.evaluate import versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "calibrate.json"
CASES = ("kvconvert:awq", "llm-compressor:awq", "llm-compressor:gptq")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="directory of a dense model")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of a model")
    parser.add_argument("--layers", type=int, default=4, help="of --shape (default: 4)")
    parser.add_argument("--peer-python", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--peer-batch", type=int, default=1, help="sequences at once in llm-compressor (default: 1)")
    parser.add_argument("--peer-dtype", default="auto", help="of llm-compressor's model (default: auto, the source's)")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="PROGRAM:METHOD", help=f"default: {CASES}")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calibration", metavar="SOURCE", help="default: text that ships with kvconvert")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="in each of which every case runs once (default: 1)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every process (default: all cores)")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for one process (default: 7200)")
    parser.add_argument("--text", type=Path, metavar="DIR", help="of the text that KL is measured on")
    parser.add_argument("--name", default="wikitext2-test", help="of its .txt file (default: wikitext2-test)")
    parser.add_argument("--segments", type=int, default=16, help="of that text (default: 16)")
    parser.add_argument("--segment-length", type=int, default=1024, help="scored tokens of a segment (default: 1024)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "weights", help="of the source's logits")
    parser.add_argument("--label", help="of this measurement among the results (default: says model and device)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None):
        parser.error("give a MODEL or --shape")
    if args.shape and args.text:
        parser.error("random weights (--shape) predict no text: leave out --text")
    return args


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds of all cases, and the quality of the last round's weights."""
    model = args.model
    if args.shape:
        model = folder / "source"
        model.mkdir()
        write_checkpoint(model, SHAPES[args.shape], args.layers)
    settings = Settings(
        model=model,
        samples=args.samples,
        length=args.length,
        seed=args.seed,
        calibration=args.calibration,
        bits=args.bits,
        group_size=args.group_size,
        device=args.device,
        threads=args.threads,
        peer_python=args.peer_python,
        peer_batch=args.peer_batch,
        peer_dtype=args.peer_dtype,
        timeout=args.timeout,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = folder / "ids.safetensors"
    data = load_token_samples(args.calibration, tokenizer, args.samples, args.length, args.seed)
    save_file({"ids": data.ids}, ids)
    cases: dict[str, dict[str, Any]] = {case: {"rounds": []} for case in args.cases}
    programs = dict.fromkeys(case.partition(":")[0] for case in cases)
    imports = {program: import_seconds(program, settings, folder) for program in programs}
    for number in range(args.rounds):
        for case, found in cases.items():
            program, _, method = case.partition(":")
            place = folder / f"{case.replace(':', '-')}-{number}"
            found["rounds"].append(run(program, method, settings, ids, place))
            print(case, json.dumps(found["rounds"][-1]), file=sys.stderr, flush=True)
    if args.text:
        torch.set_num_threads(args.threads)
        file = str(args.text / f"{args.name}.txt")
        segments = spaced_samples(file, tokenizer, args.segments, args.segment_length + 1)
        source = SourceScores(model, segments, args.work, args.device)
        for case, found in cases.items():
            place = folder / f"{case.replace(':', '-')}-{args.rounds - 1}"
            found["quality"] = source.compare(saved_model(case.partition(":")[0], settings, place))
            print(case, json.dumps(found["quality"]["kl"]), file=sys.stderr, flush=True)
    named = settings._asdict() | {
        "model": f"random {args.shape}, {args.layers} layers" if args.shape else args.model.resolve().name,
        "calibration": data.info.source,
        "text": args.name if args.text else None,
        "segments": args.segments,
        "scored_per_segment": args.segment_length,
        "hardware": torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} CPU cores",
    }
    for private in ("peer_python", "timeout"):
        del named[private]
    found = {"settings": named, "versions": versions(), "import_s": imports, "cases": cases}
    return found | ({"source_perplexity": source.perplexity} if args.text else {})


@torch.no_grad()
def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="kvconvert-calibrate-") as folder:
        found = measure(args, Path(folder))
    label = args.label or f"{found['settings']['model']}, {found['settings']['hardware']}"
    report = json.loads(args.output.read_text(encoding="utf-8")) if args.output.is_file() else {}
    report[label] = found
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(beside_peers(report))


if __name__ == "__main__":
    main()
