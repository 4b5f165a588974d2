"""Load a bundle the way a service should: verified, pinned, on the right device, within a fixed memory for the cache.

    python examples/production.py BUNDLE [SHA256 of its kvconvert.json]

The manifest lists every file with its hash, so that one hash of the manifest pins the whole bundle.
"""

import argparse
import hashlib
import sys
from pathlib import Path

import kvconvert

PROMPTS = ["Once upon a time", "It was a dark night, and the old house"]
CACHE_BYTES = 64 * 2**20


def main(bundle: str, pinned: str | None = None) -> list[str]:
    """Answer two prompts at once; returns the texts."""
    import torch  # here, so that --help does not wait for it

    from kvconvert.bundle.locate import manifest_path

    found = hashlib.sha256(manifest_path(Path(bundle)).read_bytes()).hexdigest()
    if pinned is not None and found != pinned:
        sys.exit(f"{bundle} is not the bundle that was deployed: its manifest has SHA-256 {found}.")
    # verify="full", the default, hashes every file before anything reads it.
    model, tokenizer = kvconvert.load(bundle, device_map="cuda" if torch.cuda.is_available() else None)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # `load` has it pad on the left
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True).to(model.device)
    cache = model.new_kv_cache(kv_memory=CACHE_BYTES)  # taken at once, never exceeded
    ids = model.generate(**inputs, cache=cache, max_new_tokens=32, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    print(cache.stats())
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="directory of the bundle")
    parser.add_argument("pinned", nargs="?", help="SHA-256 of its manifest; any other bundle is refused")
    try:
        print(*main(**vars(parser.parse_args())), sep="\n---\n")
    except (kvconvert.KvconvertError, OSError) as error:  # one sentence, without a traceback
        sys.exit(str(error))
