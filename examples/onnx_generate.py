"""Generate with an ONNX export: onnxruntime and numpy, and tokenizers for the text.

    kvconvert export BUNDLE -o DIRECTORY --format onnx
    python examples/onnx_generate.py DIRECTORY "Once upon a time" 40

The cache is what the graph says it is: float32, or int8 codes, or int4 codes two in a byte. Nothing here depends on it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

DTYPES = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}


def generate(directory, ids, count, stop=(), threads=0):
    """Yield up to `count` greedy tokens that follow the token ids, the logits [vocabulary] of each beside it."""
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
    from tokenizers import Tokenizer

    directory, prompt, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end = json.loads((directory / "genai_config.json").read_text())["model"].get("eos_token_id", [])
    ids = tokenizer.encode(prompt).ids
    tokens = [token for token, _ in generate(directory, ids, count, end if isinstance(end, list) else [end])]
    print(tokenizer.decode(ids + tokens))


if __name__ == "__main__":
    main()
