"""Other programs' quantized checkpoints as sources: made by the real package, given a KV plan, and compared with it.

    python benchmarks/interop_sources.py --environments DIR --find-links DIRECTORY

Each program quantizes the reference model in an environment of its own and writes down the weights that its checkpoint
stands for. A bundle is then made of the checkpoint with a KV plan (recipe kv-only), and every weight of the bundle is
compared with the program's own. Writes benchmarks/results/interop_sources.json, which `make docs`
shows in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from interop import ROOT, TORCH, environment, parser

RESULTS = ROOT / "benchmarks" / "results" / "interop_sources.json"
WRITERS = ROOT / "benchmarks" / "interop_writers"
MODEL = ROOT / "examples" / "reference-lm"
SEQUENCES, LENGTH = 4, 128
WRITTEN = "written.txt"  # what a writer printed, beside its checkpoint

ENVIRONMENTS = {
    "autoawq": ("autoawq==0.2.9", "transformers==4.51.3", "datasets<4", TORCH),  # the last that AutoAWQ was tested with
    "gptqmodel": ("gptqmodel==7.6.0", "transformers==5.23.0", "accelerate", TORCH),
    "llmcompressor": ("llmcompressor==0.14.0.1", TORCH),
}
# name: environment, script, further arguments
CASES = {
    "AutoAWQ, 4 bits": ("autoawq", "write_autoawq.py", ()),
    "GPTQModel, 4 bits, asymmetric": ("gptqmodel", "write_gptqmodel.py", ()),
    "llm-compressor, W4A16_ASYM": ("llmcompressor", "write_llmcompressor.py", ("W4A16_ASYM",)),
    "llm-compressor, W4A16": ("llmcompressor", "write_llmcompressor.py", ("W4A16",)),
}


def bundle_of(checkpoint: Path, folder: Path) -> Path:
    """A bundle of the checkpoint's own weights under a KV plan."""
    from kvconvert.convert.export import export
    from kvconvert.convert.pipeline import calibrate

    for name in ("tokenizer.json", "tokenizer_config.json"):  # which AutoAWQ and llm-compressor leave to the user
        shutil.copyfile(MODEL / name, checkpoint / name)
    calibrate(str(checkpoint), folder / "work", recipe="kv-only", samples=4, seq_len=256, progress=False)
    return export(folder / "work", folder / "bundle", progress=False)


def compare(bundle: Path, checkpoint: Path) -> dict[str, Any]:
    """How many Linears the bundle keeps quantized, and the largest difference of a weight from the program's own."""
    import torch
    from safetensors import safe_open

    from kvconvert.bundle.reader import open_bundle
    from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight

    opened = open_bundle(bundle)
    stated = torch.load(checkpoint / "weights.pt", weights_only=True)
    quantized = [module for module in opened.manifest.modules if module.method != "kept"]
    if {module.name for module in quantized} != set(stated):
        raise SystemExit(f"{checkpoint}: the bundle and the program do not quantize the same Linears")
    error = largest = 0.0
    for module in quantized:
        parts = []
        for part in AwqWeight._fields:
            name = f"{module.prefix}.{part}"
            with safe_open(opened.weight_files[name], framework="pt") as file:
                parts.append(file.get_tensor(name))
        expected = stated[module.name].float()
        error = max(error, float((dequantize_weight(AwqWeight(*parts)) - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return {
        "stored_as": opened.manifest.source.stored_as,
        "linears": len(quantized),
        "weight_error": error / largest,
    }


def run(arguments: argparse.Namespace) -> None:
    """Every case, or those named."""
    from transformers import AutoTokenizer

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    ids = AutoTokenizer.from_pretrained(MODEL)((ROOT / "README.md").read_text())["input_ids"]
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "ids.json").write_text(
            json.dumps([ids[start : start + LENGTH] for start in range(0, SEQUENCES * LENGTH, LENGTH)])
        )
        for name, (where, script, further) in CASES.items():
            if arguments.cases and not any(part in name for part in arguments.cases):
                continue
            python = environment(Path(arguments.environments or temporary), where, arguments.find_links, ENVIRONMENTS)
            folder = Path(tempfile.mkdtemp(dir=temporary))
            checkpoint = Path(arguments.checkpoints or folder) / "-".join((where, *further))
            if not (checkpoint / WRITTEN).exists():
                done = subprocess.run(
                    [python, WRITERS / script, MODEL, checkpoint, Path(temporary) / "ids.json", *further],
                    capture_output=True,
                    text=True,
                    cwd=folder,
                    timeout=arguments.timeout,
                    # GPTQModel refuses to start on fewer than three cores without it.
                    env=os.environ | {"GPTQMODEL_CPU_WORKERS": "2"},
                )
                if done.returncode:
                    raise SystemExit(f"{name}: {done.stderr.strip()[-2000:]}")
                (checkpoint / WRITTEN).write_text(done.stdout.strip().splitlines()[-1])
            results[name] = json.loads((checkpoint / WRITTEN).read_text())
            results[name] |= compare(bundle_of(checkpoint, folder), checkpoint)
            print(name, json.dumps(results[name]), flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict[str, Any]) -> str:
    """Rows of benchmarks/RESULTS.md."""
    lines = ["| made by | versions | Linears kept | largest difference of a weight |", "|---|---|---|---|"]
    for name, found in results.items():
        versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items() if key != "torch")
        error = "none" if found["weight_error"] == 0 else f"{found['weight_error']:.1e}"
        lines.append(f"| {name} | {versions} | {found['linears']} | {error} |")
    return "\n".join(lines)


def main() -> None:
    run(parser(__doc__, "checkpoints", 1800).parse_args())


if __name__ == "__main__":
    sys.exit(main())
