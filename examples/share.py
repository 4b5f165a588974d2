"""Share a bundle on the Hugging Face Hub, and use one that is there by the commit that was tested.

    python examples/share.py BUNDLE USER/NAME FOLDER

Needs a token of the Hub with the right to write: `hf auth login`, or HF_TOKEN.
"""

import argparse
import sys
from pathlib import Path

import kvconvert

PROMPT = "Once upon a time"


def main(bundle: str, repository: str, folder: str) -> str:
    """Push, fetch the same commit into a directory, and load it by its id; returns a text."""
    from kvconvert.hub import pull, push  # here, so that --help does not wait for torch

    commit = push(bundle, repository, private=True)  # verified here, and compared with what the Hub then holds
    copy = pull(repository, Path(folder) / "copy", revision=commit)  # verified again
    # Everything lies in the Hub's cache afterwards, and HF_HUB_OFFLINE=1 works. A branch may move; a commit cannot.
    model, tokenizer = kvconvert.load(repository, revision=commit)
    print(f"{repository} at {commit} is in {copy}")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="directory of the bundle to push")
    parser.add_argument("repository", help="repository on the Hub, USER/NAME")
    parser.add_argument("folder", help="directory to fetch the bundle into")
    try:
        print(main(**vars(parser.parse_args())))
    except (kvconvert.KvconvertError, OSError) as error:  # one sentence, never with the token in it
        sys.exit(str(error))
