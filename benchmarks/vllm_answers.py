"""Answers of vLLM with the plugin beside those of the runtime.

    python benchmarks/vllm_answers.py quality --model MODEL --bundle BUNDLE --text FILE
    python benchmarks/vllm_answers.py numbers --bundle BUNDLE --text FILE
    python benchmarks/vllm_answers.py prefix --bundle BUNDLE --text FILE
    python benchmarks/vllm_answers.py humaneval --model MODEL --bundle BUNDLE
    python benchmarks/vllm_answers.py gsm8k --model MODEL --bundle BUNDLE --text FILE

`quality` compares the KL from the source, of the runtime and through vLLM's `prompt_logprobs`, and `numbers` how many
of the numbers that are hidden in prompts of 3,072 tokens each finds (for models with a chat template). `prefix` lets
vLLM read prompts with the same beginning anew and then find that beginning in its cache, and compares the answers:
where prompts are read page by page both have the same passes, and where they are read at once the cache holds quantized
pages of what was attended to in full precision. `humaneval` and `gsm8k` are solved by the source and the bundle in the
runtime, and by `vllm serve BUNDLE` for the openai client, greedily. Where vLLM needs another Python,
KVCONVERT_VLLM_PYTHON names it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner import option_parser, save
from vllm_process import child, reply, with_plugins
from vllm_serving import GIB

SEGMENT_PAGES = 4
LIKELIEST = 256
# Tokens of the beginning that prompts of `prefix` share, of their ends, and of answers; and how many prompts.
SHARED, OWN, ANSWER, PROMPTS = 1024, 100, 32, 16
# Tokens of the prompts of `numbers`.
NUMBERS = 3072
# Of vLLM's settings those of every process, and what --options says.
LIMITS: dict[str, Any] = {"max_model_len": 4096, "kv_cache_memory_bytes": 2 * GIB, "gpu_memory_utilization": 0.1}


def one_by_one(dtype: str, tokens: int) -> dict[str, Any]:
    """Settings of vLLM with which prompts are read one after another, `tokens` tokens at a time."""
    return {"dtype": dtype, "enforce_eager": True, "max_num_batched_tokens": tokens, "max_num_seqs": 1}


def answers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Greedy continuations by vLLM, or what it says of the prompts themselves."""
    from vllm import LLM, SamplingParams

    llm = LLM(arguments["path"], **arguments["settings"])
    sampling = SamplingParams(temperature=0, ignore_eos=True, **arguments["sampling"])
    prompts = [{"prompt_token_ids": ids} for ids in arguments["prompts"]]
    found = llm.generate(prompts, sampling, use_tqdm=False)
    if "prompt_logprobs" not in arguments["sampling"]:
        return {"tokens": [list(answer.outputs[0].token_ids) for answer in found]}
    said = [answer.prompt_logprobs[1:] for answer in found]
    return {"logprobs": [[{token: x.logprob for token, x in at.items()} for at in prompt] for prompt in said]}


def twice(arguments: dict[str, Any]) -> dict[str, Any]:
    """Answers of vLLM with an empty cache before each prompt, then the same with what the last one left there."""
    from vllm import LLM, SamplingParams

    llm = LLM(arguments["path"], **arguments["settings"])
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=ANSWER, logprobs=LIKELIEST)
    told: dict[str, list[Any]] = {}
    for what in ("read", "found"):
        told[what] = []
        for ids in arguments["prompts"]:
            if what == "read":
                llm.reset_prefix_cache()
            answer = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0]
            first = {token: x.logprob for token, x in answer.outputs[0].logprobs[0].items()}
            told[what].append([list(answer.outputs[0].token_ids), first, answer.num_cached_tokens])
    return told


def quality(model: Path, bundle: Path, text: Path, segments: int, dtype: str) -> dict[str, Any]:
    """KL from the source, in the runtime and through vLLM's `prompt_logprobs`, of the same tokens read page by page.

    vLLM tells the likeliest tokens; the others count as one, in both figures of the KL but `runtime_all`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvconvert.fidelity.evaluate import decoder_of
    from kvconvert.fidelity.scoring import Decoder, Reader
    from kvconvert.kernels.pages import PAGE_SIZE
    from kvconvert.runtime import load

    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = SEGMENT_PAGES * PAGE_SIZE
    ids = AutoTokenizer.from_pretrained(bundle)(text.read_text(encoding="utf-8")[: 40 * length * segments])["input_ids"]
    prompts = [ids[length * number : length * (number + 1)] for number in range(segments)]
    settings = LIMITS | one_by_one(dtype, PAGE_SIZE) | {"max_logprobs": LIKELIEST}
    sampling = {"max_tokens": 1, "prompt_logprobs": LIKELIEST}
    told = child(Path(__file__), {"path": str(bundle), "settings": settings, "prompts": prompts, "sampling": sampling})
    if "logprobs" not in told:
        return told
    loaded = load(bundle, dtype=getattr(torch, dtype))[0].to(device)
    source = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(device)
    decoders = [Decoder.plain(source), decoder_of(loaded)]
    rows = []
    for prompt, said in zip(prompts, told["logprobs"], strict=True):
        whole = torch.tensor([prompt], device=device)
        with torch.no_grad():
            exact, ours = (
                torch.cat([reader.score(part) for part in whole.split(PAGE_SIZE, 1)], 1)[0, PAGE_SIZE:-1]
                for reader in (Reader(decoder, "decoder") for decoder in decoders)
            )
        # Without the prompt's own token where that is less likely.
        listed = [sorted(at.items(), key=lambda entry: -entry[1])[:LIKELIEST] for at in said[PAGE_SIZE:]]
        likeliest = torch.tensor([[int(token) for token, _ in at] for at in listed], device=device)
        theirs = torch.tensor([[logprob for _, logprob in at] for at in listed], device=device)
        three = [_with_rest(x) for x in (exact.gather(1, likeliest), ours.gather(1, likeliest), theirs)]
        rows.append(torch.stack([_kl(three[0], three[1]), _kl(three[0], three[2]), _kl(exact, ours)], 1).double())
    figures = torch.cat(rows).cpu()
    apart = figures[:, 1] - figures[:, 0]
    names = "runtime", "vllm", "runtime_all"
    kl = {name: round(float(mean), 5) for name, mean in zip(names, figures.mean(0), strict=True)}
    return {
        "kl": kl,
        "tokens": len(figures),
        "vllm_less_runtime_se": round(float(apart.std() / len(figures) ** 0.5), 5),
    }


def numbers(bundle: Path, text: Path, dtype: str) -> dict[str, Any]:
    """How many of the numbers hidden in prompts that are read page by page the runtime finds, and vLLM."""
    import torch
    from transformers import AutoTokenizer

    from kvconvert.fidelity.evaluate import decoder_of
    from kvconvert.fidelity.retrieval import RETRIEVAL_ANSWER_TOKENS, NumberBook, answer_with, retrieval_right
    from kvconvert.kernels.pages import PAGE_SIZE
    from kvconvert.runtime import load

    tokenizer = AutoTokenizer.from_pretrained(bundle)
    prose = tokenizer(text.read_text(encoding="utf-8")[: 40 * NUMBERS])["input_ids"]
    drills = NumberBook(tokenizer, prose, seed=0).drills(NUMBERS, PROMPTS)
    request = {"path": str(bundle), "settings": LIMITS | one_by_one(dtype, PAGE_SIZE)}
    request["prompts"] = [[*drill.context, *drill.cue] for drill in drills]
    told = child(Path(__file__), request | {"sampling": {"max_tokens": RETRIEVAL_ANSWER_TOKENS}})
    loaded = load(bundle, dtype=getattr(torch, dtype))[0].to("cuda" if torch.cuda.is_available() else "cpu")
    ours = answer_with(decoder_of(loaded), tokenizer, chunk=PAGE_SIZE)(drills, RETRIEVAL_ANSWER_TOKENS)
    found = {"runtime": ours, "vllm": [tokenizer.decode(ids) for ids in told.get("tokens", [])]}
    right = {name: sum(map(retrieval_right, drills, texts)) for name, texts in found.items()}
    return right | {"prompts": len(drills), "tokens": NUMBERS, "same": sum(map(str.__eq__, *found.values()))}


def prefix(bundle: Path, text: Path, dtype: str) -> dict[str, Any]:
    """Answers after a prefix that was read and after one that was found, with prompts read page by page and at once.

    `kl` is that of the first token after the prompt, of what was found from what was read, over the likeliest tokens.
    """
    import torch
    from transformers import AutoTokenizer

    from kvconvert.kernels.pages import PAGE_SIZE

    many = SHARED + OWN * PROMPTS
    ids = AutoTokenizer.from_pretrained(bundle)(text.read_text(encoding="utf-8")[: 40 * many])["input_ids"]
    prompts = [ids[:SHARED] + ids[SHARED + OWN * number :][:OWN] for number in range(PROMPTS)]
    report = {}
    for name, tokens in (("page by page", PAGE_SIZE), ("at once", 4096)):
        settings = LIMITS | one_by_one(dtype, tokens) | {"max_logprobs": LIKELIEST, "enable_prefix_caching": True}
        told = child(Path(__file__), {"path": str(bundle), "settings": settings, "prompts": prompts, "prefix": True})
        if "read" not in told:
            report[name] = told
            continue
        rows, kl = [], []
        for (read, before, _), (found, after, cached) in zip(told["read"], told["found"], strict=True):
            rows.append((cached, next((i for i in range(ANSWER) if read[i] != found[i]), ANSWER)))
            common = sorted(before.keys() & after.keys())
            kl.append(
                float(_kl(*(_with_rest(torch.tensor([said[token] for token in common])) for said in (before, after))))
            )
        cached, equal = zip(*rows, strict=True)
        report[name] = {"found_tokens": sum(cached), "equal": equal, "of": ANSWER, "kl": sum(kl) / len(kl)}
        print(name, report[name], flush=True)
    return report


def tasks(task: str, model: Path, bundle: Path, data: Path | None, limit: int | None, dtype: str) -> dict[str, Any]:
    """Share of a task's problems that each solves, and how many answers of vLLM's are those of the runtime."""
    from transformers import AutoTokenizer

    from kvconvert.fidelity.tasks.solving import TASKS, prompts_of, solve

    file = str(data) if task == "gsm8k" else None
    with serving(bundle, dtype) as server:
        # While vLLM starts.
        report = solve(bundle, task, model, data=file, limit=limit, dtype=dtype)
        asked, ours = TASKS[task], report.answers["bundle"]
        right = {"source": [answer.right for answer in report.answers["source"]]}
        right["runtime"] = [answer.right for answer in ours]
        print({name: sum(found) / len(found) for name, found in right.items()}, flush=True)
        every = asked.problems(file)
        named = {problem.name: problem for problem in every}
        problems = [named[answer.problem] for answer in ours]
        prompts, stops = prompts_of(asked, every, problems, AutoTokenizer.from_pretrained(bundle), 0, report.seed)
        sampling = {"temperature": 0, "max_tokens": asked.answer_tokens, "stop": list(stops)}
        told = asyncio.run(served(*server, prompts, sampling))
    right["vllm"] = asked.check(problems, told, progress=False)
    same = sum(answer.text == text for answer, text in zip(ours, told, strict=True))
    shares = {name: round(sum(found) / len(problems), 4) for name, found in right.items()}
    return shares | {"problems": len(problems), "same_answers": same, "right": right}


@contextmanager
def serving(bundle: Path, dtype: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """A process of `vllm serve BUNDLE` and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = os.environ.get("KVCONVERT_VLLM_PYTHON", sys.executable)
    settings = LIMITS | {"dtype": dtype, "max_num_seqs": 128}
    options = [text for name, value in settings.items() for text in ("--" + name.replace("_", "-"), str(value))]
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(bundle), "--port", str(port), *options]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(command, env=with_plugins(Path(folder)), stdout=sys.stderr, start_new_session=True)
        try:
            yield server, port
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


async def served(server: subprocess.Popen, port: int, prompts: list[list[int]], sampling: dict[str, Any]) -> list[str]:
    """Answers to all these prompts at once, for the openai client."""
    from openai import APIConnectionError, AsyncOpenAI

    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600) as client:
        while True:
            try:
                name = (await client.models.list()).data[0].id
                break
            except APIConnectionError:
                if server.poll() is not None:
                    sys.exit(f"vllm serve ended with status {server.returncode}.")
                await asyncio.sleep(1)
        asked = [client.completions.create(model=name, prompt=ids, **sampling) for ids in prompts]
        return [answer.choices[0].text for answer in await asyncio.gather(*asked)]


def _with_rest(logprobs: Any) -> Any:
    """Logarithms of probabilities [..., n], and that of all that is left."""
    import torch

    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=1e-9).log()
    return torch.cat([logprobs, rest], -1)


def _kl(p: Any, q: Any) -> Any:
    return (p.exp() * (p - q)).sum(-1)


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        arguments = json.load(sys.stdin)
        reply((twice if arguments.get("prefix") else answers)(arguments))
        return
    parser = option_parser(__doc__)
    parser.add_argument("what", choices=["quality", "numbers", "prefix", "humaneval", "gsm8k"])
    parser.add_argument("--model", type=Path, help="quality, humaneval, gsm8k: the source of --bundle")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="a file of text; gsm8k: of its problems")
    parser.add_argument("--limit", type=int, help="humaneval, gsm8k: problems (default: all)")
    parser.add_argument("--segments", type=int, default=2, help="quality: of 512 tokens (default: 2)")
    parser.add_argument("--dtype", default="bfloat16", help="of model and cache (default: bfloat16)")
    parser.add_argument("--options", type=json.loads, default={}, help="of vLLM's EngineArgs, as JSON")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.text is None and given.what != "humaneval":
        parser.error(f"{given.what} needs --text.")
    LIMITS.update(given.options)
    if given.what in ("humaneval", "gsm8k"):
        found = tasks(given.what, given.model, given.bundle, given.text, given.limit, given.dtype)
    elif given.what in ("numbers", "prefix"):
        found = (numbers if given.what == "numbers" else prefix)(given.bundle, given.text, given.dtype)
    else:
        found = quality(given.model, given.bundle, given.text, given.segments, given.dtype)
    print(found)
    save(given.json, found)


if __name__ == "__main__":
    main()
