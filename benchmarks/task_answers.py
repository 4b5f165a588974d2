"""HumanEval and GSM8K, solved by what vLLM serves and by transformers with a quantized cache, and their differences.

    python benchmarks/task_answers.py ask MODEL --gsm8k FILE --contexts 0,4096 --seeds 5 --json ANSWERS
    python benchmarks/task_answers.py ask MODEL --gsm8k FILE --options '{"kv_cache_dtype": "fp8"}' --json ANSWERS
    python benchmarks/task_answers.py ask MODEL --gsm8k FILE --cache '{"backend": "quanto", "nbits": 4}' --json ANSWERS
    python benchmarks/task_answers.py compare SOURCE OTHER...

`ask` writes the answers of one model: a source, a bundle, or what another program has quantized. vLLM answers all
prompts at once, greedily and, without context, with each seed at --sampling; requests with the same seed draw with the
same noise, so that differences are the quantization's. With --cache transformers answers greedily, without context.
`compare` says how many problems each file solves, and how much more than the first, with a 95% bootstrap interval over
problems, for each kind of question and for all of a task's. Where vLLM needs another Python, KVCONVERT_VLLM_PYTHON
names it.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import option_parser
from vllm_process import child, reply
from vllm_serving import GIB

LIMITS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "max_num_seqs": 256,
    "kv_cache_memory_bytes": 16 * GIB,
    "gpu_memory_utilization": 0.1,
}
# As Qwen2.5-Coder's authors recommend, without the penalty.
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
ROWS = 384  # of transformers' batches


def by_vllm(arguments: dict[str, Any]) -> list[list[Any]]:
    """Token ids, text, and why it ended, of each prompt's answer by vLLM."""
    from vllm import LLM, SamplingParams

    llm = LLM(arguments["path"], **arguments["settings"])
    sampling = [SamplingParams(**values) for values in arguments["sampling"]]
    prompts = [{"prompt_token_ids": ids} for ids in arguments["prompts"]]
    began = time.perf_counter()
    found = [answer.outputs[0] for answer in llm.generate(prompts, sampling, use_tqdm=False)]
    tokens = sum(len(answer.token_ids) for answer in found)
    print(f"{len(found)} answers of {tokens} tokens in {time.perf_counter() - began:.1f} s", flush=True)
    return [[list(answer.token_ids), answer.text, answer.finish_reason] for answer in found]


def by_transformers(path: Path, requests: Sequence[dict[str, Any]], cache: dict[str, Any]) -> list[list[Any]]:
    """The same by transformers' `generate` with a quantized cache, greedily, in batches of prompts of like length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval().to(device)
    order = sorted(range(len(requests)), key=lambda n: (requests[n]["max_tokens"], len(requests[n]["prompt"])))
    found: list[list[Any]] = [[] for _ in requests]
    while order:
        most = requests[order[0]]["max_tokens"]
        batch = [n for n in order[:ROWS] if requests[n]["max_tokens"] == most]
        del order[: len(batch)]
        given = tokenizer.pad({"input_ids": [requests[n]["prompt"] for n in batch]}, return_tensors="pt").to(device)
        with torch.no_grad():
            answers = model.generate(
                **given,
                max_new_tokens=most,
                do_sample=False,
                cache_implementation="quantized",
                cache_config=cache,
            )
        for n, row in zip(batch, answers[:, given["input_ids"].shape[1] :].tolist(), strict=True):
            ends = [i for i, token in enumerate(row) if token == tokenizer.eos_token_id]
            ids = row[: ends[0]] if ends else row
            text = tokenizer.decode(ids, skip_special_tokens=True)
            for stop in requests[n]["stop"]:
                text = text.partition(stop)[0]
            found[n] = [ids, text, "stop" if ends else "length"]
    return found


def ask(path: Path, given: Any) -> dict[str, Any]:
    """Answers of a model, by the kind of question, the name of the problem, and the seed."""
    from transformers import AutoTokenizer

    from kvconvert.fidelity.tasks.problems import TASKS
    from kvconvert.fidelity.tasks.solving import prompts_of

    tokenizer = AutoTokenizer.from_pretrained(path)
    requests: list[dict[str, Any]] = []
    for task in TASKS.values():
        every = task.problems(str(given.gsm8k) if task.name == "gsm8k" else None)
        problems = every[: given.limit]
        for context in [0] if given.cache else given.contexts:
            prompts, stops = prompts_of(task, every, problems, tokenizer, context, 0)
            for seed in [None, *(() if context or given.cache else range(given.seeds))]:
                sampling = {"temperature": 0.0} if seed is None else given.sampling | {"seed": seed}
                how = f"{task.name}, {context} tokens before, {'greedy' if seed is None else 'sampled'}"
                sampling |= {"max_tokens": task.answer_tokens, "stop": list(stops)}
                requests += [
                    {"how": how, "task": task, "problem": p, "prompt": ids, "sampling": sampling}
                    for p, ids in zip(problems, prompts, strict=True)
                ]
    if given.cache:
        asked = [request["sampling"] | {"prompt": request["prompt"]} for request in requests]
        found = by_transformers(path, asked, given.cache)
    else:
        settings = LIMITS | given.options
        arguments = {"path": str(path), "settings": settings} | {
            name: [request[single] for request in requests]
            for name, single in (("prompts", "prompt"), ("sampling", "sampling"))
        }
        found = child(Path(__file__), arguments)
        if isinstance(found, dict):
            sys.exit(f"vLLM ended with status {found['failed']}.")
    answers: dict[str, dict[str, list[Any]]] = {}
    for task in TASKS.values():
        own = [n for n, request in enumerate(requests) if request["task"] is task]
        right = task.check([requests[n]["problem"] for n in own], [found[n][1] for n in own], progress=False)
        for n, solved in zip(own, right, strict=True):
            ids, text, reason = found[n]
            answer = {"right": solved, "tokens": ids, "cut_off": reason == "length", "text": text}
            answers.setdefault(requests[n]["how"], {}).setdefault(requests[n]["problem"].name, []).append(answer)
    return answers


def compare(files: Sequence[Path]) -> None:
    """Print a row for every kind of question and file."""
    import torch

    from kvconvert.fidelity.scoring import bootstrap_mean
    from kvconvert.tables import text_table

    opened = {file.name.partition(".")[0]: json.loads(gzip.decompress(file.read_bytes())) for file in files}
    first = next(iter(opened.values()))
    rows: list[tuple[str, ...]] = []
    ways = {how: [how] for how in first}
    for task in dict.fromkeys(how.partition(",")[0] for how in first):
        ways[f"{task}, all"] = [how for how in first if how.startswith(task)]
    for way, hows in ways.items():
        exact = together(first, hows)
        for name, answers in opened.items():
            if not set(hows) <= answers.keys():
                continue
            other = together(answers, hows)
            pairs = [(own, other[problem]) for problem, own in exact.items()]
            right = [torch.tensor([[float(a["right"]) for a in pair[side]] for pair in pairs]) for side in (0, 1)]
            every = [answer for _, own in pairs for answer in own]
            agreed = [same(a, b) for x, y in pairs for a, b in zip(x, y, strict=True)]
            change = bootstrap_mean((right[1] - right[0]).mean(1), 0)
            spread = "" if change.bounds is None else " ({:+.1f} to {:+.1f})".format(*(100 * x for x in change.bounds))
            rows.append(
                (
                    way,
                    name,
                    f"{right[1].mean():.1%}",
                    "" if answers is first else f"{100 * change.mean:+.1f}{spread}",
                    f"{statistics.fmean(len(a['tokens']) for a in every):.0f}",
                    f"{statistics.fmean(a['cut_off'] for a in every):.1%}",
                    "" if answers is first else f"{statistics.fmean(agreed):.0f}",
                )
            )
    print(text_table(("", "", "right", "change in points", "tokens", "cut off", "the same"), rows))


def together(answers: dict[str, dict[str, list[Any]]], hows: Sequence[str]) -> dict[str, list[Any]]:
    """Each problem's answers to several kinds of question."""
    return {problem: [answer for how in hows for answer in answers[how][problem]] for problem in answers[hows[0]]}


def same(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Tokens before two answers differ."""
    both = zip(first["tokens"], second["tokens"], strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(first["tokens"]), len(second["tokens"])))


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        reply(by_vllm(json.load(sys.stdin)))
        return
    parser = option_parser(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("ask")
    one.add_argument("model", type=Path)
    one.add_argument("--gsm8k", type=Path, required=True, metavar="FILE", help="problems, as JSON lines")
    one.add_argument("--contexts", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    one.add_argument("--seeds", type=int, default=0, help="sampled answers to each problem beside a greedy one")
    one.add_argument("--sampling", type=json.loads, default=SAMPLING, help="of vLLM's SamplingParams, as JSON")
    one.add_argument("--limit", type=int, help="problems of each task (default: all)")
    one.add_argument("--options", type=json.loads, default={}, help="of vLLM's EngineArgs, as JSON")
    one.add_argument("--cache", type=json.loads, help="transformers' cache_config instead of vLLM, as JSON")
    one.add_argument("--json", type=Path, required=True, metavar="FILE", help="written as JSON, compressed by gzip")
    two = commands.add_parser("compare")
    two.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args()
    if given.what == "compare":
        compare(given.files)
        return
    given.json.write_bytes(gzip.compress(json.dumps(ask(given.model, given)).encode()))


if __name__ == "__main__":
    main()
