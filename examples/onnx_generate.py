"""Generate with an ONNX export: onnxruntime and numpy, and tokenizers for the text.

    kvconvert export BUNDLE -o DIRECTORY --format onnx
    python examples/onnx_generate.py DIRECTORY "Once upon a time" --tokens 40

The cache is what the graph says it is: float32, or int8 codes, or int4 codes two in a byte. Nothing here depends on it.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import numpy as np

DTYPES = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}


def generate(directory, ids, count, stop=(), threads=0):
    """Yield up to `count` greedy tokens that follow the token ids, the logits [vocabulary] of each beside it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(Path(directory) / "model.onnx", options, providers=["CPUExecutionProvider"])
    caches = [port for port in session.get_inputs() if port.name.startswith("past_key_values")]
    # [batch, KV heads, tokens, channels], empty at first
    past = {port.name: np.zeros((1, port.shape[1], 0, port.shape[3]), DTYPES[port.type]) for port in caches}
    new, length = np.array([ids], np.int64), 0
    for _ in range(count):
        length += new.shape[1]
        inputs = {"input_ids": new, "attention_mask": np.ones((1, length), np.int64)}
        logits, *present = session.run(None, inputs | past)
        past = dict(zip(past, present, strict=True))
        token = int(logits[0, -1].argmax())
        yield token, logits[0, -1]
        if token in stop:
            return
        new = np.array([[token]], np.int64)


def main():
    """Print a continuation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="directory of an ONNX export")
    parser.add_argument("prompt", metavar="TEXT", help="text to continue")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="at most; 40 by default")
    args = parser.parse_args()
    for package in ("onnxruntime", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            parser.error(f"{package} is not installed; run pip install {package}")
    from tokenizers import Tokenizer

    try:
        end = json.loads((args.directory / "genai_config.json").read_text())["model"].get("eos_token_id", [])
    except OSError as error:
        parser.error(f"{args.directory} is no ONNX export ({error.strerror}: {error.filename})")
    tokenizer = Tokenizer.from_file(str(args.directory / "tokenizer.json"))
    ids = tokenizer.encode(args.prompt).ids
    if not ids or args.tokens < 1:
        parser.error("give a text of at least one token, and at least 1 as --tokens")
    stop = end if isinstance(end, list) else [end]
    tokens = [token for token, _ in generate(args.directory, ids, args.tokens, stop)]
    print(tokenizer.decode(ids + tokens))


if __name__ == "__main__":
    main()
