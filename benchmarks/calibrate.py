"""kvconvert beside llm-compressor and GPTQModel: time, memory and what the quantized weights cost the model.

    python benchmarks/calibrate.py MODEL --peer-python PYTHON --text DIR [--samples 32 --length 512] [--rounds 1]
    python benchmarks/calibrate.py --shape 8b --layers 4 --samples 64 --peer-python PYTHON --device cuda

PYTHON is the interpreter of an environment with the others that `--cases` names. All programs quantize weights alone,
asymmetrically in the same groups and on the same token ids, with their defaults otherwise; the others' batches and
llm-compressor's dtype can be chosen. Each run is a fresh process, imports, reading and saving included (kvconvert:
`convert`), and the programs take turns. Recorded are wall and processor time and the largest anonymous resident memory,
as in benchmarks/memory.py, and what the imports alone take; files of all programs are in memory before the first round.
With --text, what each has saved is read back, dequantized in float32, and compared with the source in float32.
--shape makes random weights instead, of which only time and memory mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peers
import processes
import torch
from memory import SHAPES, write_checkpoint
from runner import RESULTS, ROOT, option_parser, read, save
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from weights_docs import beside_peers
from weights_measure import SourceScores

from kvconvert.data.samples import load_mixture
from kvconvert.data.text import spaced_samples
from kvconvert.fidelity.evaluate import versions
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight

OUTPUT = RESULTS / "calibrate.json"
# What the report says of how cases were measured, by the names of options.
RECORDED = (
    "samples",
    "length",
    "seed",
    "bits",
    "group_size",
    "device",
    "threads",
    "peer_batch",
    "peer_dtype",
    "segments",
)
CASES = ("kvconvert:awq", "llm-compressor:awq", "llm-compressor:gptq")


def arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
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
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None):
        parser.error("give a MODEL or --shape")
    if args.shape and args.text:
        parser.error("random weights (--shape) predict no text: leave out --text")
    return args


def run(program: str, method: str, args: argparse.Namespace, ids: Path, folder: Path) -> dict[str, Any]:
    """Quantize with one program into `folder`: its processes' wall and processor time and peak anonymous memory."""
    folder.mkdir()
    if program in peers.SCRIPTS:
        chosen = {"method": method, "bits": args.bits, "group_size": args.group_size, "batch_size": args.peer_batch}
        chosen |= {"dtype": args.peer_dtype, "device": args.device}
        process_of = partial(process, args=args)
        return peers.quantize(program, args.peer_python, args.model, ids, folder, chosen, process_of)
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'[weights]\nmethod = "{method}"\nbits = {args.bits}\ngroup_size = {args.group_size}\n\n[kv]\npreset = "none"\n'
    )
    command = [sys.executable, "-m", "kvconvert", "convert", args.model, folder / "model", "--recipe", recipe]
    command += ["--device", args.device, "--samples", args.samples, "--seq-len", args.length, "--seed", args.seed]
    command += [] if args.calibration is None else ["--data", args.calibration]
    return process(command, args)[0]


def process(command: Sequence[object], args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """A command with as many threads as every program gets."""
    threads = {name: str(args.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return processes.run([str(part) for part in command], threads, args.timeout)


def import_seconds(program: str, args: argparse.Namespace) -> float:
    """Seconds of a program's imports alone, in a process that finds their files in memory."""
    ours = [sys.executable, "-c", "import kvconvert.convert.pipeline, kvconvert.convert.export"]
    theirs = f"{peers.IMPORTS.get(program)}; from transformers import AutoModelForCausalLM"
    for _ in range(2):
        measured, _ = process([args.peer_python, "-c", theirs] if program in peers.SCRIPTS else ours, args)
    return measured["wall_s"]


def saved_model(program: str, args: argparse.Namespace, folder: Path) -> PreTrainedModel:
    """The source in float32 with all weights replaced by those that a program saved, dequantized in float32."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if program in peers.SCRIPTS:
        weights = peers.dequantized(program, args.peer_python, folder, partial(process, args=args))
    else:
        weights = bundle_weights(folder / "model")
    peers.replace_weights(model, weights, program)
    return model.to(args.device).eval()


def bundle_weights(bundle: Path) -> dict[str, Tensor]:
    """The weights of a bundle, dequantized."""
    stored: dict[str, Tensor] = {}
    for file in sorted(bundle.glob("model*.safetensors")):
        stored |= load_file(file)
    dense = {name: tensor.float() for name, tensor in stored.items() if name.rpartition(".")[2] in ("weight", "bias")}
    for name in stored:
        linear, _, part = name.rpartition(".")
        if part == "qweight":
            packed = AwqWeight(*(stored[f"{linear}.{field}"] for field in AwqWeight._fields))
            dense[f"{linear}.weight"] = dequantize_weight(packed)
    return dense


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds of all cases, and the quality of the last round's weights."""
    name = f"random {args.shape}, {args.layers} layers" if args.shape else args.model.resolve().name
    if args.shape:
        args.model = folder / "source"
        args.model.mkdir()
        write_checkpoint(args.model, args.shape, args.layers)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = folder / "ids.safetensors"
    data = load_mixture(args.calibration, tokenizer, args.samples, args.length, args.seed)
    save_file({"ids": data.ids}, ids)
    cases: dict[str, dict[str, Any]] = {case: {"rounds": []} for case in args.cases}
    imports = {program: import_seconds(program, args) for program in {case.partition(":")[0]: None for case in cases}}
    for number in range(args.rounds):
        for case, found in cases.items():
            program, _, method = case.partition(":")
            place = folder / f"{case.replace(':', '-')}-{number}"
            found["rounds"].append(run(program, method, args, ids, place))
            print(case, json.dumps(found["rounds"][-1]), file=sys.stderr, flush=True)
    settings = {field: getattr(args, field) for field in RECORDED}
    settings |= {"model": name, "calibration": data.info.source, "scored_per_segment": args.segment_length}
    settings |= {"text": args.name if args.text else None}
    settings["hardware"] = torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} CPU cores"
    report = {"settings": settings, "versions": versions(), "import_s": imports, "cases": cases}
    if args.text:
        torch.set_num_threads(args.threads)
        file = str(args.text / f"{args.name}.txt")
        segments = spaced_samples(file, tokenizer, args.segments, args.segment_length + 1)
        source = SourceScores(args.model, segments, args.work, args.device)
        report["source_perplexity"] = source.perplexity
        for case, found in cases.items():
            place = folder / f"{case.replace(':', '-')}-{args.rounds - 1}"
            found["quality"] = source.compare(saved_model(case.partition(":")[0], args, place))
            print(case, json.dumps(found["quality"]["kl"]), file=sys.stderr, flush=True)
    return report


@torch.no_grad()
def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="kvconvert-calibrate-") as folder:
        found = measure(args, Path(folder))
    label = args.label or f"{found['settings']['model']}, {found['settings']['hardware']}"
    report = read(args.output) | {label: found}
    save(args.output, report)
    print(beside_peers(report))


if __name__ == "__main__":
    main()
