"""Greedy tokens of vLLM in an environment of its own: reads a request as JSON, writes the tokens of each prompt.

Run as a program by `test_tokens.py`. On a line of its own behind the marker, because vLLM writes to standard output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from kvconvert.kernels.device import interpreted

MARKER = "TOKENS "


def generate(request: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
    """The tokens of each prompt, and how many requests were interrupted, prompt tokens found in the prefix cache,
    drafts accepted, and 4-bit weights kept in our layout.
    """
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from kvconvert.vllm import weights

    # Several may share a GPU.
    memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 28} if torch.cuda.is_available() else {}
    llm = LLM(request["model"], disable_log_stats=False, **memory | request["arguments"])
    adapter = LoRARequest("adapter", 1, request["adapter"]) if request.get("adapter") else None
    sampling = SamplingParams(temperature=0, max_tokens=request["new_tokens"], ignore_eos=True)
    found = []
    for batch in request["batches"]:
        if request.get("forgets"):
            llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt} for prompt in batch]
        answers = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        found += [list(answer.outputs[0].token_ids) for answer in answers]
    counted = {"interrupted": "vllm:num_preemptions", "hits": "vllm:prefix_cache_hits"}
    counted["accepted"] = "vllm:spec_decode_num_accepted_tokens"
    metrics = llm.get_metrics()
    told = {key: int(sum(m.value for m in metrics if m.name == name)) for key, name in counted.items()}
    return found, told | {"packed": len(weights._packed)}


@contextmanager
def recording(file: str) -> Iterator[None]:
    """Save what each of our layers is given and gives, pass after pass: its number, queries, keys, values, output, and
    the first three fields of its scoring.
    """
    from kvconvert.vllm.backend import LowBitAttention
    from kvconvert.vllm.bundle import layer_index

    forward, found = LowBitAttention.forward, []

    def noting(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        given = [x.clone() for x in (query, key, value)]
        forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if attn_metadata is not None:
            count = attn_metadata.num_actual_tokens
            tensors = [x[:count] for x in (*given, output.clone())]
            found.append((layer_index(layer.layer_name), *tensors, tuple(self.scoring[:3])))
        return output

    LowBitAttention.forward = noting
    yield
    torch.save(found, file)


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    # FlashInfer need not be there.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    # Two ranks may share processors.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    try:
        asked = json.load(sys.stdin)
        file = asked.get("records")
        with interpreted() if asked["kernels"] else nullcontext(), recording(file) if file else nullcontext():
            print(MARKER + json.dumps(generate(asked)), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
