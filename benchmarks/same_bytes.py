"""Prove that a change of the code changes nothing of the product: 19 conversions and more than 4,000 generated tokens.

    OMP_NUM_THREADS=1 python benchmarks/same_bytes.py base.json                    # before the change
    OMP_NUM_THREADS=1 python benchmarks/same_bytes.py now.json --against base.json # after it

Nine recipes on tiny random models, the nine presets of the papers on the reference model, and the reference
vision-language model. Of each the file holds a SHA-256 by file of the bundle (the manifest without versions of
libraries), one of the generated token ids, and the bytes that the cache took. Files are comparable on one machine with
equal libraries and threads. Minutes on one thread; `--only NAME` for a part.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]  # before an installed one: this checkout is what is compared

from tiny.models import ARCHITECTURES  # noqa: E402

from kvconvert import Recipe, calibrate, export, load  # noqa: E402

TEXT = ROOT / "kvconvert" / "data" / "texts" / "books-val.txt"
PROMPT_TOKENS = (330, 410)  # two rows, of which the first is padded; pages of 128 tokens fill in both
NEW_TOKENS = 108
PRESETS = (
    "kivi",
    "oscar",
    "oscar-g128",
    "kitty",
    "kitty-pro",
    "calibquant-1bit",
    "calibquant-2bit",
    "minikv",
    "minikv-pyramid",
)


@dataclass(frozen=True)
class Conversion:
    """One model and what is done to it.

    Attributes:
        model: an architecture of tests/tiny, or a directory of examples.
        recipe: a preset, or a file of examples/recipes.
        changes: values of the recipe, as `--set` has them.
        search: budget of a recipe that searches.
    """

    model: str
    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)


CONVERSIONS = {
    "default": Conversion("llama", "default"),
    "kv-only": Conversion("qwen3", "kv-only"),
    "rtn": Conversion("gpt_oss", "rtn"),
    "awq": Conversion("mixtral", "weights-only"),
    "latent": Conversion("deepseek_v3", "weights-only"),
    "auto": Conversion("llama", "auto", {"weights.average_bits": 5.5}, {"kv_bits": 6.0, "auto_tokens": 512}),
    "static": Conversion("qwen2", str(ROOT / "examples" / "recipes" / "onnx-int8.toml")),
    "gptq": Conversion("gemma3_text", "oscar", {"weights.method": "awq+gptq", "weights.bits": 3}),
    "center": Conversion("phi", "kitty", {"kv.key_center": "calibrated", "kv.rotate_keys": "hadamard"}),
    **{name: Conversion("reference-lm", name) for name in PRESETS},
    "images": Conversion("reference-vlm", "calibquant-2bit-visual"),
}


def sha256(content: bytes) -> str:
    """The hash by which contents are compared."""
    return hashlib.sha256(content).hexdigest()


def hashed(bundle: Path) -> dict[str, str]:
    """A hash by file of a bundle; of the manifest, without its seal and the versions of libraries."""
    found = {}
    for file in sorted(path for path in bundle.rglob("*") if path.is_file()):
        content = file.read_bytes()
        if file.name == "kvconvert.json":
            fields = json.loads(content)
            for name in ("kvconvert_version", "versions", "sha256"):
                fields.pop(name, None)
            content = json.dumps(fields, sort_keys=True).encode()
        found[file.relative_to(bundle).as_posix()] = sha256(content)
    return found


def generated(bundle: Path) -> dict[str, Any]:
    """The number and hash of the ids that two rows continue with, and the bytes of their cache."""
    model, processor = load(bundle, device_map="cpu", dtype=torch.float32)
    tokenizer = getattr(processor, "tokenizer", processor)
    text = tokenizer(TEXT.read_text(encoding="utf8")[:4000])["input_ids"]
    rows = [text[:length] for length in PROMPT_TOKENS]
    ids = torch.tensor([[0] * (len(rows[1]) - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (len(rows[1]) - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if processor is not tokenizer:
        from kvconvert.data.drawings import draw

        drawings = [draw(0, 0), draw(0, 1)]
        chats = [
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": drawing.questions[0].text}]}]
            for drawing in drawings
        ]
        prompts = [processor.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
        inputs = processor(
            images=[[drawing.image] for drawing in drawings],
            text=prompts,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
    result = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    new = result.sequences[:, inputs["input_ids"].shape[1] :]
    stats = getattr(result.past_key_values, "stats", None)
    return {
        "tokens": new.numel(),
        "ids": sha256(json.dumps(new.tolist()).encode()),
        "cache_bytes": None if stats is None else stats().bytes_used,
    }


def convert(case: Conversion, directory: Path) -> dict[str, Any]:
    """Calibrate, export and generate in an empty directory."""
    model = ROOT / "examples" / case.model
    if not model.is_dir():
        model = ARCHITECTURES[case.model].write(directory / "model")
    recipe = Recipe.load(case.recipe, case.changes).with_budget(**case.search)
    samples = {"samples": 3} if case.model == "reference-vlm" else {"samples": 3, "seq_len": 384}
    calibrate(str(model), directory / "work", recipe=recipe, device="cpu", progress=False, **samples)
    bundle = export(directory / "work", directory / "bundle", device="cpu", progress=False)
    return {"files": hashed(bundle)} | generated(bundle)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences of two results, one line each; only what both have made is compared."""
    found = []
    for name in sorted(old.keys() & new.keys()):
        files = (old[name]["files"], new[name]["files"])
        names = sorted(files[0].keys() | files[1].keys())
        found += [f"{name}: {file}" for file in names if files[0].get(file) != files[1].get(file)]
        found += [f"{name}: {what}" for what in ("tokens", "ids", "cache_bytes") if old[name][what] != new[name][what]]
    return found


def main() -> None:
    """Write the hashes, and fail where they are not those of another file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--against", type=Path, metavar="JSON", help="compare with this file")
    parser.add_argument("--only", nargs="+", choices=CONVERSIONS, default=list(CONVERSIONS), metavar="NAME")
    options = parser.parse_args()
    begun, results = time.perf_counter(), {}
    for name in options.only:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            results[name] = convert(CONVERSIONS[name], Path(directory))
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    tokens = sum(result["tokens"] for result in results.values())
    print(f"{len(results)} conversions, {tokens:,} tokens, {time.perf_counter() - begun:.0f} s")
    if options.against is not None:
        found = differences(json.loads(options.against.read_text(encoding="utf8")), results)
        if found:
            sys.exit("not equal:\n" + "\n".join(found))
        print(f"all equal to {options.against}")


if __name__ == "__main__":
    main()
