"""Mixed traffic through an Engine: 160 requests with prompts of 128 to 10,000 tokens and answers of 32 to 360.

    python benchmarks/traffic.py --json benchmarks/results/traffic.json
    python benchmarks/traffic.py --cases at_once small poisson --rate 6.17
    python benchmarks/traffic.py --tiny                  # some seconds on a CPU: does everything, measures nothing
    python benchmarks/traffic.py --beside-vllm DIR --json FILE      # vLLM in bf16 first, which is imported from DIR

The prompts have 366,374 tokens together and the answers 23,545; lengths are log-uniform, drawn with --seed and scaled
to these sums. Answers are sampled with top-p and end by length. Every round has tokens of its own, so that no prefix of
a prompt is stored. The model is random, of an 8B Llama's shape (4-bit weights in groups of 128, `oscar-g128`).

`at_once`: all requests come at once; without vLLM and on a GPU a second round is profiled: which share of the time some
kernel runs. `small`: the same with --small-kv-gib. `poisson`: --rate requests a second with exponential gaps.
`first_token`: single prompts to `generate`, each of another length up to 128, 1,000 and 8,000 tokens, then all again.
`steps`: milliseconds until the last row's first token, and per token while all rows answer, of 1 x 1,000, 1 x 130,000,
and 32 x 8,192 tokens. A tenth of the requests comes before what is measured. Of the slowest passes it is said what else
happened in them. `--shape qwen3.5-9b` has three layers of linear attention to one of softmax, `nemotron-3-nano` Mamba 2
and mixtures of experts.

With `--beside-vllm` (DIR may be "" if this Python imports vLLM) the cases, all of them by default, go to vLLM in bf16
and then to the Engine, on the same GPU; --rate is then 70% of the requests per second that vLLM served all at once.
Both have --max-batch-tokens tokens in a pass. `ratios` are speeds over vLLM's, times over vLLM's.
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from engine_models import SHAPES, packed_model
from mixed_load import SAMPLING, mixed_load
from pass_times import PassTimes
from runner import machine, need_gpu, option_parser, save
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from vllm_process import VLLM

from kvconvert.methods import KVScheme
from kvconvert.runtime import Engine, Sampling

GIB = 1 << 30
CASES = ("at_once", "poisson", "first_token", "small", "steps")
VLLM_CLASSES = {"llama-8b": "LlamaForCausalLM", "qwen3.5-9b": "Qwen3_5ForCausalLM"}
VLLM_CLASSES |= {"nemotron-3-nano": "NemotronHForCausalLM"}
# Rows and prompt tokens of the case steps, and the tokens that each row answers while all do.
STEPS, STEP_TOKENS = ((1, 1000), (1, 130_000), (32, 8192)), 64
PROFILED_STEPS = 60
PROMPTS = (128, 1000, 8000)
REPEATS = 5
LOAD = 0.7


def requests_of(seed: int, scale: int, vocabulary: int, draw: int = 0) -> list[dict[str, Any]]:
    """Arguments of `Engine.add` for `mixed_load`."""
    return [
        {
            "prompt": prompt,
            "max_new_tokens": answer,
            "sampling": Sampling(**SAMPLING, seed=number),
            "stop_token_ids": [],
        }
        for number, (prompt, answer) in enumerate(mixed_load(seed, scale, vocabulary, draw))
    ]


def serve(engine: Engine, requests: list[dict[str, Any]], arrivals: Sequence[float]) -> dict[str, Any]:
    """Serve requests that come at these seconds, and measure them and the passes."""
    cached = engine.stats().cached_tokens
    told, took, passes = answered(engine, requests, arrivals)
    found = summary(requests, arrivals, told, took)
    return found | {"cached_tokens": engine.stats().cached_tokens - cached, "passes": passes.by_kind()}


def answered(
    engine: Engine, requests: list[dict[str, Any]], arrivals: Sequence[float]
) -> tuple[list[list[float]], float, PassTimes]:
    """Seconds after which each request's tokens were told, and all had ended; and the passes."""
    told: list[list[float]] = [[] for _ in requests]
    added, begin = 0, time.perf_counter()
    with PassTimes(engine) as passes:
        while added < len(requests) or engine.stats().waiting or engine.stats().running:
            while added < len(requests) and arrivals[added] <= time.perf_counter() - begin:
                heard = told[added]
                engine.add(
                    **requests[added], on_event=lambda event, heard=heard: heard.append(time.perf_counter() - begin)
                )
                added += 1
            if not ((now := engine.stats()).waiting or now.running):
                time.sleep(1e-3)
                continue
            passes.step()
    engine.run()
    return told, time.perf_counter() - begin, passes


def step_cases(seed: int, scale: int, vocabulary: int) -> dict[str, list[tuple[list[int], int]]]:
    """Prompts and tokens to answer of the case steps: all rows answer STEP_TOKENS after the last has begun."""
    dice, found = random.Random(seed), {}
    for rows, tokens in STEPS:
        passes = -(-rows * tokens // 2048)
        prompts = [dice.choices(range(5, vocabulary), k=tokens // scale) for _ in range(max(1, rows // scale))]
        found[f"{rows} x {tokens:,}"] = [(prompt, STEP_TOKENS + (passes if rows > 1 else 0)) for prompt in prompts]
    return found


def step_times(told: list[list[float]]) -> dict[str, float]:
    """Figures of the case steps, from the seconds after which tokens were told."""
    begin, end = max(times[0] for times in told), min(times[-1] for times in told)
    tokens = sum(begin < at <= end for times in told for at in times)
    return {"first_token_s": begin, "token_ms": (end - begin) * 1e3 * len(told) / tokens}


def summary(
    requests: list[dict[str, Any]], arrivals: Sequence[float], told: list[list[float]], took: float
) -> dict[str, Any]:
    """Speed and waiting times, from the seconds after which requests came and their tokens were told.

    The time per further token is a request's mean, and the quantiles are over requests.
    """
    first = [times[0] - came for times, came in zip(told, arrivals, strict=True)]
    further = [(times[-1] - times[0]) / (len(times) - 1) for times in told if len(times) > 1]
    prompts = sum(len(request["prompt"]) for request in requests)
    answers = sum(map(len, told))
    return {
        "seconds": took,
        "tokens_per_second": answers / took,
        "prompt_tokens_per_second": prompts / took,
        "first_token_p50_s": quantile(first, 0.5),
        "first_token_p99_s": quantile(first, 0.99),
        "further_token_p50_ms": quantile(further, 0.5) * 1e3,
        "further_token_p99_ms": quantile(further, 0.99) * 1e3,
    }


def quantile(numbers: list[float], share: float) -> float:
    """The smallest number that `share` of all do not exceed."""
    return sorted(numbers)[max(0, math.ceil(share * len(numbers)) - 1)]


def busy_share(engine: Engine, requests: list[dict[str, Any]], steps: int) -> float:
    """The share of the time in which some kernel runs, over some steps after the first ones."""
    added = [engine.add(**request) for request in requests]
    for _ in range(3):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        begin = time.perf_counter()
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
    for request in added:
        request.cancel()
    engine.run()
    busy, until = 0.0, -math.inf
    ranges = [e.time_range for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    for begin, end in sorted((r.start, r.end) for r in ranges):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e6 / took


def arrivals_at(rate: float | None, count: int, seed: int) -> list[float]:
    """Seconds after which requests come, with exponential gaps; zeros without a rate."""
    dice, now, arrivals = random.Random(seed + 1), 0.0, []
    for _ in range(count):
        arrivals.append(now)
        now += dice.expovariate(rate) if rate else 0.0
    return arrivals


def vllm_cases(arguments: Any, config: Any, requests: list[dict[str, Any]], scale: int) -> dict[str, Any]:
    """vLLM's part: all cases with the large cache, then those with the small one."""
    report: dict[str, Any] = {}
    pairs = [(request["prompt"], request["max_new_tokens"]) for request in requests]
    at_once = [0.0] * len(pairs)
    longest = step_cases(arguments.seed, scale, config.vocab_size).values() if "steps" in arguments.cases else []
    most = max(len(prompt) + answer for some in (pairs, *longest) for prompt, answer in some)
    options = {
        "dtype": "bfloat16",
        "max_model_len": max(most, PROMPTS[-1] // scale + 1),
        "max_num_batched_tokens": arguments.max_batch_tokens // scale,
        "enable_prefix_caching": False,
    }
    if arguments.shape == "qwen3.5-9b":
        options["gdn_prefill_backend"] = "triton"  # FlashInfer's, the default, has to be installed
    if not arguments.tiny:
        # Only a limit at the start; the cache has kv_cache_memory_bytes.
        options["gpu_memory_utilization"] = 0.6
    vllm = VLLM(arguments.beside_vllm, config, options | {"kv_cache_memory_bytes": int(arguments.kv_gib * GIB)})
    report["version"], report["ready_seconds"] = vllm.version, vllm.ready_seconds
    vllm.serve(pairs[::10], at_once[::10], SAMPLING)
    # The rate depends on it, too.
    if {"at_once", "poisson"} & {*arguments.cases}:
        report["at_once"] = summary(requests, at_once, *vllm.serve(pairs, at_once, SAMPLING))
    if "poisson" in arguments.cases:
        arguments.rate = arguments.rate or LOAD * len(pairs) / report["at_once"]["seconds"]
        gaps = arrivals_at(arguments.rate, len(pairs), arguments.seed)
        report["poisson"] = summary(requests, gaps, *vllm.serve(pairs, gaps, SAMPLING))
    if "first_token" in arguments.cases:
        for length, prompts in prompts_of(arguments.seed, scale, config.vocab_size).items():
            times = [vllm.serve([(prompt, 1)], [0.0], {"temperature": 0.0})[1] for prompt in prompts]
            report[f"first_token_{length}_ms"] = statistics.median(times[1:]) * 1e3
    if "steps" in arguments.cases:
        for case, own in step_cases(arguments.seed, scale, config.vocab_size).items():
            report[case] = step_times(vllm.serve(own, [0.0] * len(own), {"temperature": 0.0})[0])
    if "small" in arguments.cases:
        vllm.limit(int(vllm.blocks * arguments.small_kv_gib / arguments.kv_gib))
        report["small"] = summary(requests, at_once, *vllm.serve(pairs, at_once, SAMPLING))
    vllm.close()
    return report


def prompts_of(seed: int, scale: int, vocabulary: int) -> dict[int, list[list[int]]]:
    """Prompts whose first tokens are timed, by the most tokens that they have; each has at least four fifths of that,
    as the turns of a chat have other lengths every time.
    """
    dice, found = random.Random(seed), {}
    for most in (length // scale for length in PROMPTS):
        lengths = [dice.randint(most * 4 // 5, most) for _ in range(1 + REPEATS)]
        found[most] = [dice.choices(range(5, vocabulary), k=length) for length in lengths]
    return found


def first_token_ms(model: PreTrainedModel, prompts: list[list[int]]) -> float:
    """Until `generate` returns the first token: the median after one that is not counted."""
    times = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=1, do_sample=False).tolist()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) * 1e3


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Speed over vLLM's, and times over vLLM's, of the cases that both have."""
    found = {
        f"{case}_speed": theirs[case]["seconds"] / ours[case]["seconds"]
        for case in ("at_once", "small")
        if case in ours
    }
    if "poisson" in ours:
        for key in ("first_token_p50_s", "first_token_p99_s", "further_token_p99_ms"):
            found["poisson_" + key.rpartition("_")[0]] = ours["poisson"][key] / theirs["poisson"][key]
    for case in (f"{rows} x {tokens:,}" for rows, tokens in STEPS):
        if case in ours:
            found |= {f"{case} {key}": ours[case][key] / theirs[case][key] for key in ours[case]}
    singles = [key for key in ours if key.startswith("first_token")]
    return found | {key.removesuffix("_ms"): ours[key] / theirs[key] for key in singles}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b", help="whose sizes the model has")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU; requests and lengths by 8")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, tokens and arrivals")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="(default: at_once, and all of them beside vLLM)")
    parser.add_argument("--rate", type=float, help="of the case poisson, requests per second")
    parser.add_argument("--beside-vllm", metavar="DIR", help="compare with vLLM, which is imported from this folder")
    parser.add_argument("--kv-gib", type=float, default=30.0, help="memory for pages (default: 30)")
    parser.add_argument("--small-kv-gib", type=float, default=4.0, help="of the case small (default: 4)")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--prompt-chunk", type=int, default=2048)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--keep-weights", action="store_true", help="of the Engine, in 16 bits, too")
    arguments = parser.parse_args()
    beside = arguments.beside_vllm is not None
    arguments.cases = arguments.cases or (CASES if beside else CASES[:1])
    if "poisson" in arguments.cases and not beside and arguments.rate is None:
        parser.error("the case poisson needs --rate, or --beside-vllm to choose it")
    if not arguments.tiny:
        need_gpu()
    device, scale, shape = "cuda", 1, {}
    if arguments.tiny:
        device, scale = "cpu", 8
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        if arguments.shape == "qwen3.5-9b":
            shape |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
            shape |= {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
        if arguments.shape == "nemotron-3-nano":
            shape |= {"layers_block_type": ["linear_attention", "moe", "full_attention"], "n_routed_experts": 8}
            shape |= {"mamba_num_heads": 8, "mamba_head_dim": 32, "moe_intermediate_size": 64, "n_groups": 2}
            shape |= {"moe_shared_expert_intermediate_size": 64}
    config = SHAPES[arguments.shape](**shape)
    requests = requests_of(arguments.seed, scale, config.vocab_size)
    results: dict[str, Any] = {
        "machine": machine() if device == "cuda" else "CPU",
        "options": {name: value for name, value in vars(arguments).items() if name != "json"},
    }
    if beside:
        config.architectures = [VLLM_CLASSES[arguments.shape]]
        results["vllm"] = vllm_cases(arguments, config, requests, scale)
        print(json.dumps(results["vllm"], indent=1), flush=True)
        save(arguments.json, results)

    def engine_with(gib: float) -> Engine:
        made = Engine(
            model,
            kv_memory=None if arguments.tiny else int(gib * GIB),
            max_batch=arguments.max_batch // scale,
            prompt_chunk=arguments.prompt_chunk // scale,
            max_batch_tokens=arguments.max_batch_tokens // scale,
            keep_weights=arguments.keep_weights,
        )
        # As `kvconvert serve` does.
        gc.collect()
        gc.freeze()
        return made

    def measured(name: str, found: Any) -> None:
        print(name, json.dumps(found), flush=True)
        ours[name] = found
        # What follows may be cut off.
        save(arguments.json, results)

    ours: dict[str, Any] = {}
    results["kvconvert"] = ours
    draws, at_once = count(), [0.0] * len(requests)

    def round_of(engine: Engine, arrivals: list[float], every: int = 1) -> dict[str, Any]:
        """Serve requests with tokens that were not served before."""
        fresh = requests_of(arguments.seed, scale, config.vocab_size, next(draws))
        return serve(engine, fresh[::every], arrivals[::every])

    scheme = KVScheme.preset("oscar-g128").with_online_rotation()
    begin = time.perf_counter()
    model = packed_model(config, [scheme] * config.num_hidden_layers, device)
    if {"at_once", "poisson", "steps"} & {*arguments.cases}:
        engine = engine_with(arguments.kv_gib)
        measured("ready_seconds", time.perf_counter() - begin)
        round_of(engine, at_once, every=10)
        if "at_once" in arguments.cases:
            measured("at_once", round_of(engine, at_once))
        if "poisson" in arguments.cases:
            gaps = arrivals_at(arguments.rate, len(requests), arguments.seed)
            measured("poisson", round_of(engine, gaps))
        if "steps" in arguments.cases:
            for case, own in step_cases(arguments.seed, scale, config.vocab_size).items():
                greedy = [{"prompt": ids, "max_new_tokens": new, "stop_token_ids": []} for ids, new in own]
                measured(case, step_times(answered(engine, greedy, [0.0] * len(own))[0]))
        if not beside and device == "cuda":
            measured("gpu_busy", busy_share(engine, requests, PROFILED_STEPS))
        del engine
        gc.unfreeze()
        gc.collect()
    if "first_token" in arguments.cases:
        for length, prompts in prompts_of(arguments.seed, scale, config.vocab_size).items():
            measured(f"first_token_{length}_ms", first_token_ms(model, prompts))
            measured(f"same_lengths_again_{length}_ms", first_token_ms(model, prompts))
    if "small" in arguments.cases:
        engine = engine_with(arguments.small_kv_gib)
        round_of(engine, at_once, every=10)
        measured("small", round_of(engine, at_once))
    if beside:
        results["ratios"] = ratios(ours, results["vllm"])
    gc.unfreeze()
    print(json.dumps(results, indent=1))
    save(arguments.json, results)


if __name__ == "__main__":
    main()
