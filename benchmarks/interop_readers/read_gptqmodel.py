"""Read a bundle with gptqmodel: `read_gptqmodel.py BUNDLE IDS.json`; prints one line of JSON."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from gptqmodel import GPTQModel


def main(bundle: str, ids: str) -> None:
    """Load, and print the logits of the last token and 16 greedy tokens, or the error."""
    found: dict = {"versions": {package: version(package) for package in ("gptqmodel", "transformers", "torch")}}
    try:
        model = GPTQModel.load(bundle, device="cpu")
        found["kernel"] = type(model.model.model.layers[0].mlp.up_proj).__name__
        tokens = torch.tensor([json.loads(Path(ids).read_text())])
        with torch.inference_mode():
            found["logits"] = model.model(tokens, use_cache=False).logits[0, -1].float().tolist()
            made = model.model.generate(tokens, max_new_tokens=16, do_sample=False)
            found["tokens"] = made[0, tokens.shape[1] :].tolist()
    except Exception as error:  # the answer is what the reader says
        found["error"] = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
