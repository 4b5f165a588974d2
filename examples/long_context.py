"""Read a long text within a fixed memory for the cache, and several requests beside it.

    python examples/long_context.py BUNDLE TEXT_FILE

The Engine reads prompts in chunks, so that memory for activations does not grow with them, and reserves each request's
pages before it begins: what does not fit waits.
"""

import argparse
import sys
from pathlib import Path

import kvconvert

CACHE_BYTES = 256 * 2**20


def main(bundle: str, file: str, kv_memory: int = CACHE_BYTES, prompt_chunk: int = 2048) -> list[str]:
    """Continue the text, as far as the positions hold it, beside two short requests; returns the three texts."""
    import torch  # here, so that --help does not wait for it

    from kvconvert.runtime import Engine, Sampling

    if not Path(file).is_file():
        sys.exit(f"There is no file {file}; give the path of a text.")
    text = Path(file).read_text(encoding="utf8")
    model, tokenizer = kvconvert.load(bundle)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    engine = Engine(model, tokenizer, kv_memory=kv_memory, prompt_chunk=prompt_chunk, max_batch=4)
    ids = tokenizer(text, verbose=False).input_ids  # without a warning that the text is longer than what is read
    read = ids[: model.config.get_text_config().max_position_embeddings - 32]
    print(f"reading {len(read):,} of the text's {len(ids):,} tokens")
    long = engine.add(read, max_new_tokens=32)
    short = [
        engine.add(tokenizer(text).input_ids, max_new_tokens=16, sampling=Sampling(temperature=0.7, seed=seed))
        for seed, text in enumerate(("The miller", "Once upon a time"))
    ]
    engine.run()
    print(engine.stats())
    return [request.text for request in (long, *short)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="directory of a bundle, or its id on the Hub")
    parser.add_argument("file", help="text to continue")
    try:
        print(*main(**vars(parser.parse_args())), sep="\n---\n")
    except (kvconvert.KvconvertError, OSError, UnicodeDecodeError) as error:  # one sentence, without a traceback
        sys.exit(str(error))
