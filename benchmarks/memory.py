"""Peak memory and time of `calibrate` and `export` on random checkpoints of common shapes, by number of layers.

    python benchmarks/memory.py [SHAPE:LAYERS ...] [--recipe rtn|awq|gptq|PRESET|FILE] [--probe] [--samples 8]
        [--length 128] [--device cpu] [--json FILE]

SHAPE is 0.5b, 1.5b or 8b. A sharded bfloat16 checkpoint of that shape
with LAYERS decoder layers is written to a temporary directory; `kvconvert calibrate` and `kvconvert export` then run
as processes of their own. What is recorded is the largest anonymous resident memory (RssAnon of /proc/PID/status,
looked at every 10 ms), which is what cannot be taken back under pressure, and the processor and wall time of each. With
--probe, `kvconvert plan` runs before, and what it says of memory, disk and time is recorded beside what then happened.
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

import torch
from processes import run
from runner import ROOT, option_parser, read, save
from transformers import LlamaConfig, LlamaForCausalLM

from kvconvert.bundle.writer import write_weights
from kvconvert.io.records import TensorInfo

TOKENIZER = ROOT / "examples" / "reference-lm"
SHARD_BYTES = 2**29
CASES = ("0.5b:4", "0.5b:24", "1.5b:4", "1.5b:8", "8b:2", "8b:4", "8b:8")
# Round-to-nearest weights and a cache whose calibration measures ranges only.
RTN = """
[weights]
method = "rtn"
bits = 4
group_size = "auto"

[kv]
preset = "kivi"
calibrate_clip_ratios = false
"""
RECIPES = {method: RTN.replace("rtn", method) for method in ("rtn", "awq", "gptq", "awq+gptq")}


SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
SMALL = {"vocab_size": 151936, "tie_word_embeddings": True}
VOCABULARIES = {"0.5b": SMALL, "1.5b": SMALL, "8b": {"vocab_size": 128256, "tie_word_embeddings": False}}


def write_checkpoint(directory: Path, shape: str, layers: int) -> None:
    """A checkpoint of random weights of a Llama, one tensor in memory at a time."""
    sizes = SHAPES[shape] | VOCABULARIES[shape] | {"num_hidden_layers": layers, "max_position_embeddings": 4096}
    config = LlamaConfig(**sizes, bos_token_id=0, eos_token_id=0, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, directory / name)
    with torch.device("meta"):
        shapes = {name: list(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2**22, generator=generator).mul_(0.02).bfloat16()  # repeated: what is in them does not matter

    def tensor(name: str) -> torch.Tensor:
        size = shapes[name]
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        count = size[0] * size[1]
        return rows.repeat(-(-count // len(rows)))[:count].view(size)

    infos = {name: TensorInfo(dtype="BF16", shape=size) for name, size in shapes.items()}
    write_weights(directory, infos, tensor, SHARD_BYTES)


def planned(*arguments: str) -> dict[str, Any]:
    """The output of `plan --json`."""
    command = [sys.executable, "-m", "kvconvert", "plan", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape and number of layers."""
    name, _, layers = case.partition(":")
    with tempfile.TemporaryDirectory(prefix="kvconvert-memory-") as folder:
        model, work, bundle = (Path(folder) / part for part in ("model", "work", "bundle"))
        model.mkdir()
        write_checkpoint(model, name, int(layers))
        recipe = args.recipe
        if recipe in RECIPES:
            recipe = str(Path(folder) / "recipe.toml")
            Path(recipe).write_text(RECIPES[args.recipe])
        options = ["--recipe", recipe, "--samples", str(args.samples), "--seq-len", str(args.length)]
        options += ["--device", args.device]
        probed = planned(str(model), *options) if args.probe else None
        command = [sys.executable, "-m", "kvconvert"]
        calibrated, _ = run([*command, "calibrate", str(model), "-o", str(work), *options])
        exported, _ = run([*command, "export", str(work), "-o", str(bundle)])
        manifest = json.loads((bundle / "kvconvert.json").read_text())
    found = {"shape": name, "layers": int(layers), "recipe": args.recipe, "samples": args.samples}
    found |= {"length": args.length, "device": args.device, "calibrate": calibrated, "export": exported}
    if probed is not None:
        found["plan"] = {
            "memory": probed["memory"],
            "bundle_bytes": {"plan": probed["disk"]["bundle"], "bundle": manifest["weights"]["bytes"]},
            "seconds": {"plan": probed["seconds"], "real": calibrated["wall_s"] + exported["wall_s"]},
        }
    return found


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, help="SHAPE:LAYERS")
    parser.add_argument("--recipe", default="rtn", help=f"{', '.join(RECIPES)}, a preset or a file (default: rtn)")
    parser.add_argument("--probe", action="store_true", help="compare with what `plan` says, its probe included")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where to write the results; kept cases of other shapes stay")
    args = parser.parse_args()
    results = read(args.json).get("cases", [])
    for case in args.cases:
        found = measure(case, args)
        key = ("shape", "layers", "recipe", "samples", "length", "device")
        results = [old for old in results if any(old.get(part) != found[part] for part in key)] + [found]
        peaks = {step: found[step]["peak_anonymous_bytes"] / 1e9 for step in ("calibrate", "export")}
        print(case, args.recipe, *(f"{step} {peak:.2f} GB" for step, peak in peaks.items()), flush=True)
        if args.probe:
            print(json.dumps(found["plan"]), flush=True)
        setting = {"torch": torch.__version__, "cpus": os.cpu_count()}
        save(args.json, {"setting": setting, "cases": results})


if __name__ == "__main__":
    main()
