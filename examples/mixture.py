"""Convert a mixture of experts, such as a Mixtral or a Qwen3-MoE, and see how its experts are stored.

    python examples/mixture.py MODEL OUTPUT

Each expert is calibrated on the tokens that the router sends to it; docs/models.md says what happens to those that
receive few. The router keeps its dtype.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import kvconvert


def main(
    model: str, output: str, samples: int = 128, seq_len: int = 512, group_size: int | str = "auto"
) -> Counter[str]:
    """Convert, generate, and return how many experts' Linears are stored in which way."""
    from kvconvert.models.source import open_source  # here, so that --help does not wait for torch

    if "expert" not in open_source(model).config.to_json_string():  # before minutes of calibration
        sys.exit(f"{model} is not a mixture of experts; use kvconvert convert, or name another model.")
    work, bundle = Path(output) / "work", Path(output) / "bundle"
    recipe = kvconvert.Recipe.load("default", {"weights.group_size": group_size})
    kvconvert.calibrate(model, work, recipe=recipe, samples=samples, seq_len=seq_len)
    kvconvert.export(work, bundle, force=True)
    print(f"The bundle is in {bundle}.")
    modules = json.loads((bundle / "kvconvert.json").read_text())["modules"]
    stored = Counter(module["method"] for module in modules if ".experts." in module["name"])
    loaded, tokenizer = kvconvert.load(bundle)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    print(tokenizer.decode(loaded.generate(**inputs, max_new_tokens=16, do_sample=False)[0]))
    return stored


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a model, or its id on the Hub")
    parser.add_argument("output", help="directory to write the bundle and its working directory to")
    try:
        print(main(**vars(parser.parse_args())))
    except (kvconvert.KvconvertError, OSError) as error:  # one sentence, without a traceback
        sys.exit(str(error))
