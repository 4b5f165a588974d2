"""Convert with a recipe of your own: wide keys, one exact layer, another width for some weights, and limits.

    python examples/own_recipe.py MODEL OUTPUT

kvconvert recipes NAME prints a preset with every value that a recipe may state.
"""

import argparse
import sys
from pathlib import Path

import kvconvert

RECIPE = """
[weights]
method = "rtn"
group_size = 32

[[weights.modules]]   # inputs of the last Linear of an MLP vary most
match = "*.down_proj"
bits = 8

[kv]
preset = "oscar"
key_bits = 4          # keys cost more fidelity than values

[[kv.layers]]         # the first layer stays as it is
index = [0]
preset = "none"

[limits]
max_kl = 10.0         # export measures the bundle and refuses it beyond this
"""


def main(model: str, output: str, samples: int = 64, seq_len: int = 512) -> Path:
    """Write OUTPUT/recipe.toml, convert with it, and return the bundle."""
    folder = Path(output)
    if (folder / "kvconvert.json").exists():
        raise kvconvert.KvconvertError(f"{folder} is a bundle, which stays as it was sealed; name another directory.")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "recipe.toml"
    file.write_text(RECIPE)
    recipe = kvconvert.Recipe.load(str(file))
    print(f"layer 0: cache {recipe.scheme(0) or 'as it is'}; layer 1: keys of {recipe.scheme(1).key_bits} bits")
    kvconvert.calibrate(model, folder / "work", recipe=recipe, samples=samples, seq_len=seq_len)
    bundle = kvconvert.export(folder / "work", folder / "bundle", force=True)
    print(f"The bundle is in {bundle}.")
    return bundle


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a model, or its id on the Hub")
    parser.add_argument("output", help="directory to write the recipe, the bundle, and its working directory to")
    try:
        main(**vars(parser.parse_args()))
    except (kvconvert.KvconvertError, OSError) as error:  # one sentence, without a traceback
        sys.exit(str(error))
