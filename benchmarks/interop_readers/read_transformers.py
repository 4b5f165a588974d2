"""Read a bundle with transformers, without kvconvert: `read_transformers.py BUNDLE IDS.json`; prints one line of JSON.

Run in an environment without gptqmodel, transformers has no reader of AWQ weights; with it, it has one.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main(bundle: str, ids: str) -> None:
    """Load, and print the logits of the last token and 16 greedy tokens, or the error."""
    found: dict = {"versions": {}}
    for package in ("transformers", "gptqmodel", "compressed-tensors", "torch"):
        try:
            found["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    try:
        model = AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float16, device_map="cpu")
        found["kernel"] = type(model.model.layers[0].mlp.up_proj).__name__
        tokens = torch.tensor([json.loads(Path(ids).read_text())])
        with torch.inference_mode():
            found["logits"] = model(tokens, use_cache=False).logits[0, -1].float().tolist()
            found["tokens"] = model.generate(tokens, max_new_tokens=16, do_sample=False)[0, tokens.shape[1] :].tolist()
    except Exception as error:  # the answer is what the reader says
        found["error"] = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
