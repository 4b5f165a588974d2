"""vLLM in bf16, with AWQ weights and an fp8 cache, and with bundles, one after another on one GPU.

    python benchmarks/vllm_serving.py tokens --model MODEL --bundle BUNDLE
    python benchmarks/vllm_serving.py speed --only bf16,bundle --cases 1x1000,16x12000,mixed --json FILE

Needs vLLM in the same environment. `tokens` lets the runtime and vLLM continue the same texts greedily, in the model's
dtype, and says after how many tokens they part; rounding differs between engines, so that long answers may part where
two tokens are nearly as likely. `quality` compares the KL from the source, of the runtime and through vLLM's
`prompt_logprobs`: `--model MODEL --bundle BUNDLE --text FILE`. Where vLLM needs another Python,
KVCONVERT_VLLM_PYTHON names it for these two.

`speed` takes random weights of an 8B Llama's shape (AWQ in groups of 128 and `oscar-g128` for bundles) and a cache of
--memory GiB for each. Contenders: bf16, awq-fp8, bundle (graphs for decoding and prompts), bundle-piecewise (for what
is not attention), bundle-eager; and, if asked for, bundle-2-gpus and bundle-per-head, the same with one GPU; each is
started once, with --together all of them at the same time before any is measured. Cases: `ROWSxTOKENS` gives
milliseconds until the last row's first token and per further token,
`fullx8192` the same of as many rows as the cache holds, `mixed` seconds for the requests of traffic.py, and `mixed-4`
the same with 4 GiB of the cache. A tenth of the mixed requests and a prompt of 9,000 tokens come before. Every figure
is written at once; a case that fails, or has no time left, says so, and the next one runs. --seconds is the time of
each contender, its start included. With --tiny a small model serves lengths divided by 8 on a CPU, which does
everything and measures nothing.

`profile` takes the same models with --layers layers, in one process with vLLM's scheduler: of each `ROWSxTOKENS` case
milliseconds of a step that reads prompts and of one that answers, how much of them kernels take, and which ones.

Compiled code stays in ~/.cache/vllm/torch_compile_cache (VLLM_CACHE_ROOT) and ~/.triton/cache: a second start on the
same machine is faster.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from mixed_load import SAMPLING, mixed_load
from runner import option_parser, save
from vllm_process import VLLM, with_plugins

NEW_TOKENS = 64
PROFILED_STEPS, KERNELS = 32, 24
SEGMENT_PAGES = 4
LIKELIEST = 256
GIB = 1 << 30
CASES = "1x1000,16x12000,mixed,mixed-4,1x30000,1x130000,fullx8192"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "dtype": "bfloat16",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip
CONTENDERS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "awq-fp8": {"kv_cache_dtype": "fp8"},
    "bundle": {},
    "bundle-piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "bundle-eager": {"enforce_eager": True},
    "bundle-per-head": {},
    "bundle-2-gpus": {"tensor_parallel_size": 2},
}


def linears(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Input and output features of a layer's Linears."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    attention = {"q_proj": (hidden, heads), "k_proj": (hidden, kv_heads), "v_proj": (hidden, kv_heads)}
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    named = {f"self_attn.{name}": sizes for name, sizes in (attention | {"o_proj": (heads, hidden)}).items()}
    return named | {f"mlp.{name}": sizes for name, sizes in mlp.items()}


def write_model(folder: Path, contender: str, shape: dict[str, Any]) -> Path:
    """A directory from which vLLM takes shapes: a plain model, an AWQ checkpoint, or a bundle, all without weights."""
    config = LLAMA_8B | shape
    if contender == "awq-fp8":
        config["quantization_config"] = {
            "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
    if contender.startswith("bundle"):
        write_bundle(folder, config, "per_head" if contender.endswith(("gpus", "head")) else "joint")
    else:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_bundle(folder: Path, config: dict[str, Any], token_norm: str) -> None:
    """A bundle's description: config.json, manifest and an empty KV plan."""
    from kvconvert.bundle.locate import MANIFEST_NAME, PLAN_NAME
    from kvconvert.bundle.manifest import (
        FORMAT_VERSION,
        LayerPlan,
        Manifest,
        ModuleCoverage,
        WeightsInfo,
        quantization_config,
    )
    from kvconvert.io.records import FileInfo, SourceInfo, TensorInfo
    from kvconvert.io.tensorfile import replace_tensors
    from kvconvert.methods import KVScheme

    scheme = replace(KVScheme.preset("oscar-g128"), token_norm=token_norm)
    modules, tensors = [], {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in linears(config).items():
            full = f"model.layers.{layer}.{name}"
            shapes = {"qweight": (inputs, outputs // 8), "qzeros": (inputs // 128, outputs // 8)}
            tensors |= {f"{full}.{part}": TensorInfo(dtype="I32", shape=list(shape)) for part, shape in shapes.items()}
            tensors[f"{full}.scales"] = TensorInfo(dtype="F16", shape=[inputs // 128, outputs])
            sizes = {"bits": 4, "group_size": 128, "in_features": inputs, "out_features": outputs}
            modules.append(ModuleCoverage(name=full, method="rtn", **sizes))
    for name in ("lm_head", "model.embed_tokens"):
        kind = "linear" if name == "lm_head" else "embedding"
        modules.append(ModuleCoverage(name=name, kind=kind, method="kept", reason="outside the layers"))
        tensors[f"{name}.weight"] = TensorInfo(dtype="BF16", shape=[config["vocab_size"], config["hidden_size"]])
    weights = WeightsInfo(method="rtn", bits=4, group_size=128, bytes=0, parameters=0, bits_per_weight=0.0)
    config["quantization_config"] = quantization_config(weights, modules)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / PLAN_NAME).parent.mkdir()
    replace_tensors(folder / PLAN_NAME, {})
    files = {}
    for name in ("config.json", PLAN_NAME):
        content = (folder / name).read_bytes()
        files[name] = FileInfo(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    head_dim = config["head_dim"]
    layer = {"kv": scheme.to_dict(), "head_dim": head_dim, "num_key_value_heads": config["num_key_value_heads"]}
    layer["value_group_size"] = scheme.value_group_for(head_dim)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        kvconvert_version="0",
        versions={},
        source=SourceInfo(id="random", config_sha256="0" * 64, weights_sha256={}),
        recipe={},
        data=None,
        transforms=[],
        conventions={},
        layers=[LayerPlan(index=i, **layer) for i in range(config["num_hidden_layers"])],
        modules=modules,
        weights=weights,
        tensors=tensors,
        plan={},
        files=files,
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())


def child(arguments: dict[str, Any], **variables: str) -> dict[str, Any]:
    """Run this file again for `answers` or `profiled`, with these variables; its last line is its report."""
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ.get("KVCONVERT_VLLM_PYTHON", sys.executable), __file__, "child"]
        ended = subprocess.run(
            command, input=json.dumps(arguments), env=with_plugins(Path(folder)) | variables, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if line.startswith("REPORT ")]
    return json.loads(lines[0].removeprefix("REPORT ")) if lines else {"failed": ended.returncode}


class Contender:
    """One way to serve, with its figures.

    Args:
        name: one of CONTENDERS.
        memory: GiB of its cache.
        seconds: that it has, its starts included.
        mixed: prompts and numbers of tokens to answer.
        tiny: whether the model is, and lengths are divided by 8.
    """

    def __init__(self, name: str, memory: float, seconds: float, mixed: list[tuple[list[int], int]], tiny: bool):
        self.name, self.memory, self.mixed, self.scale = name, memory, mixed, 8 if tiny else 1
        self.shape = TINY if tiny else {}
        self._folder = tempfile.TemporaryDirectory()
        self.model = write_model(Path(self._folder.name), name, self.shape)
        self.end = time.perf_counter() + seconds
        self.vllm: VLLM | None = None

    def measure(self, cases: list[str], report: dict[str, Any], written: Callable[[], None]) -> None:
        """Fill `report` case by case, and call `written` after each."""
        for case in cases:
            try:
                if self.vllm is None:
                    self.start(report)
                report[case] = self._run(case)
            except SystemExit as end:
                report[case] = {"failed": str(end) if time.perf_counter() < self.end else "no time left"}
                self.stop()
            print(self.name, case, report[case], flush=True)
            written()
        self.stop()

    def stop(self) -> None:
        """End vLLM."""
        if self.vllm is not None:
            self.vllm.kill()
        self.vllm = None

    @property
    def options(self) -> dict[str, Any]:
        """Of vLLM's `EngineArgs`."""
        return {
            "kv_cache_memory_bytes": int(self.memory * GIB),
            # Only a limit at the start, of all the GPU's memory; other work may have the rest.
            "gpu_memory_utilization": 0.1,
            "max_model_len": 131072 // self.scale,
            "max_num_seqs": 256 // self.scale,
            "max_num_batched_tokens": 8192 // self.scale,
            "max_cudagraph_capture_size": 256 // self.scale,
            "enable_prefix_caching": False,
            **CONTENDERS[self.name],
        }

    def profile(self, cases: list[str], layers: int) -> dict[str, Any]:
        """Steps and their kernels, see `profiled`."""
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder), self.name, self.shape | {"num_hidden_layers": layers})
            fixed = {"model": str(model), "load_format": "dummy", "skip_tokenizer_init": True}
            sizes = [[int(part) for part in case.split("x")] for case in cases if case[0].isdigit()]
            asked = [[rows, tokens // self.scale] for rows, tokens in sizes]
            return child({"profile": asked, "options": fixed | self.options}, VLLM_ENABLE_V1_MULTIPROCESSING="0")

    def start(self, report: dict[str, Any]) -> None:
        """Start vLLM and serve some requests that are not measured."""
        left = self.end - time.perf_counter()
        if left < 1:
            sys.exit()
        self.vllm = VLLM("", self.model, self.options, left)
        report["start_s"], report["blocks"] = round(self.vllm.ready_seconds, 1), self.vllm.blocks
        begin = time.perf_counter()
        few = [*self.mixed[::10], *requests_of(1, 9000 // self.scale)]
        self.vllm.serve(few, [0.0] * len(few), SAMPLING)
        report["warm_s"] = round(time.perf_counter() - begin, 1)

    def _run(self, case: str) -> dict[str, Any]:
        if case.startswith("mixed"):
            share = float(case.partition("-")[2] or self.memory) / self.memory
            self.vllm.limit(int(self.vllm.blocks * share))
            told, seconds = self.vllm.serve(self.mixed, [0.0] * len(self.mixed), SAMPLING)
            self.vllm.limit(self.vllm.blocks)
            return {"seconds": round(seconds, 2), "first_token_p50_s": round(statistics.median(t[0] for t in told), 2)}
        count, _, length = case.partition("x")
        tokens = int(length) // self.scale
        rows = self._rows(tokens) if count == "full" else int(count)
        told, _ = self.vllm.serve(requests_of(rows, tokens), [0.0] * rows, {"temperature": 0.0})
        # While all rows answer.
        begin, end = max(times[0] for times in told), min(times[-1] for times in told)
        answered = sum(begin < at <= end for times in told for at in times)
        return {
            "rows": rows,
            "first_ms": round(begin * 1e3, 1),
            "token_ms": round((end - begin) * 1e3 * rows / answered, 3),
            "tokens_per_second": round(answered / (end - begin), 1),
        }

    def _rows(self, tokens: int) -> int:
        """Requests of so many prompt tokens that the cache holds at a time, their answers included."""
        if not self.name.startswith("bundle"):

            def blocks_for(count: int) -> int:
                return -(-count // self.vllm.block_tokens)
        else:
            import torch

            from kvconvert.vllm.bundle import served_bundle

            ranks = CONTENDERS[self.name].get("tensor_parallel_size", 1)
            blocks_for = served_bundle(str(self.model)).layout(torch.bfloat16, ranks).blocks_for
        rows = 1
        while (
            rows < 256 // self.scale
            and (rows + 1) * blocks_for(tokens + answer_tokens(rows + 1, tokens)) < self.vllm.blocks
        ):
            rows += 1
        return rows


def answer_tokens(rows: int, tokens: int) -> int:
    """Enough for the first row to answer until `NEW_TOKENS` passes after the last one has begun to."""
    return 1 + NEW_TOKENS + (rows - 1) * -(-tokens // 8192)


def requests_of(rows: int, tokens: int) -> list[tuple[list[int], int]]:
    """Random prompts and how many tokens each is answered with."""
    dice = random.Random(rows + tokens)
    return [(dice.choices(range(5, TINY["vocab_size"]), k=tokens), answer_tokens(rows, tokens)) for _ in range(rows)]


def answers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Greedy continuations by vLLM, or what it says of the prompts themselves."""
    from vllm import LLM, SamplingParams

    limits = {"max_model_len": 4096, "kv_cache_memory_bytes": 2 * GIB, "gpu_memory_utilization": 0.1}
    llm = LLM(arguments["path"], **limits | arguments["settings"])
    sampling = SamplingParams(temperature=0, ignore_eos=True, **arguments["sampling"])
    prompts = [{"prompt_token_ids": ids} for ids in arguments["prompts"]]
    found = llm.generate(prompts, sampling, use_tqdm=False)
    if "prompt_logprobs" not in arguments["sampling"]:
        return {"tokens": [list(answer.outputs[0].token_ids) for answer in found]}
    said = [answer.prompt_logprobs[1:] for answer in found]
    return {"logprobs": [[{token: x.logprob for token, x in at.items()} for at in prompt] for prompt in said]}


def profiled(arguments: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of steps of an engine in this process, and microseconds and number of each kernel in a step."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import EngineArgs, LLMEngine, SamplingParams

    begin, has_gpu = time.perf_counter(), torch.cuda.is_available()
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments["options"]))
    report: dict[str, Any] = {"start_s": round(time.perf_counter() - begin, 1)}
    sampling = SamplingParams(temperature=0, max_tokens=3 * PROFILED_STEPS, ignore_eos=True, detokenize=False)

    def seconds(is_over: Callable[[list[Any]], bool]) -> tuple[float, int]:
        """Of the steps until something is so after one, given its outputs, and their number."""
        begin, count, over = time.perf_counter(), 0, False
        while not over:
            over = is_over(engine.step())
            count += 1
        if has_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, count

    def answered(rows: int) -> Callable[[list[Any]], bool]:
        told: set[str] = set()

        def is_over(outputs: list[Any]) -> bool:
            told.update(output.request_id for output in outputs)
            return len(told) == rows

        return is_over

    def after(steps: int) -> Callable[[list[Any]], bool]:
        left = iter(range(steps - 1))
        return lambda outputs: next(left, None) is None

    for rows, tokens in arguments["profile"]:
        found: dict[str, Any] = {}
        # The first time compiles, the second is timed, the third told in detail.
        for turn in range(3):
            for number, (prompt, _) in enumerate(requests_of(rows, tokens)):
                engine.add_request(f"{rows}x{tokens}-{turn}-{number}", {"prompt_token_ids": prompt}, sampling)
            for part, is_over in (("prompts", answered(rows)), ("answers", after(PROFILED_STEPS))):
                activities = [ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU]
                with profile(activities=activities) if turn == 2 else nullcontext() as told:
                    took, steps = seconds(is_over)
                if turn == 1:
                    found[part] = {"steps": steps, "step_ms": round(took / steps * 1e3, 3)}
                elif turn == 2:
                    found[part] |= kernels_of(told.key_averages(), steps, has_gpu)
            seconds(lambda outputs: not engine.has_unfinished_requests())
        report[f"{rows}x{tokens}"] = found
    return report


def kernels_of(averages: Any, steps: int, has_gpu: bool) -> dict[str, Any]:
    """What kernels, or a CPU's operators, take in a step, and which take the most."""
    name = "self_device_time_total" if has_gpu else "self_cpu_time_total"
    rows = sorted(((getattr(one, name) / steps, one.count / steps, one.key[:80]) for one in averages), reverse=True)
    listed = [[round(taken, 1), round(count, 1), key] for taken, count, key in rows[:KERNELS] if taken]
    return {"kernels_ms": round(sum(row[0] for row in rows) / 1e3, 3), "kernels": listed}


def print_profile(name: str, report: dict[str, Any]) -> None:
    """A table of each case."""
    print(name, {key: value for key, value in report.items() if not isinstance(value, dict)}, flush=True)
    for case, parts in report.items():
        for part, told in parts.items() if isinstance(parts, dict) else ():
            print(f"{name} {case} {part}: {told['step_ms']} ms a step, of which kernels {told['kernels_ms']} ms")
            for taken, count, kernel in told["kernels"]:
                print(f"{taken:12.1f} us {count:8.1f} x  {kernel}", flush=True)


def compare(model: Path, bundle: Path, new: int, names: list[str], report_path: Path | None) -> None:
    """After how many tokens vLLM with the plugin, and vLLM with the source, part from the runtime.

    `margins` are how much larger the runtime's logit of its own token is, in units of its precision at that size: 1 or
    less is a tie that rounding decides.
    """
    import torch
    from transformers import AutoTokenizer

    from kvconvert.runtime import load

    text = "".join(inspect.getsource(module) for module in (argparse, inspect))
    ids = AutoTokenizer.from_pretrained(bundle)(text)["input_ids"]
    prompts = [ids[start : start + length] for start, length in ((0, 100), (100, 700), (300, 1500), (50, 2100))]
    loaded = load(bundle, dtype="auto")[0].to("cuda" if torch.cuda.is_available() else "cpu")
    precision = torch.finfo(loaded.dtype).eps
    expected, logits = [], []
    for prompt in prompts:
        whole = torch.tensor([prompt], device=loaded.device)
        answer = loaded.generate(
            whole, max_new_tokens=new, min_new_tokens=new, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        expected.append(answer.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(answer.logits).float().cpu())
    del loaded
    torch.cuda.empty_cache()
    report: dict[str, Any] = {"prompts": [len(prompt) for prompt in prompts], "new": new}
    contenders = {name: (bundle, CONTENDERS[name]) for name in names if name.startswith("bundle")}
    for name, (path, settings) in (contenders | {"source": (model, {})}).items():
        request = {"path": str(path), "settings": settings, "prompts": prompts, "sampling": {"max_tokens": new}}
        found = child(request)
        if "tokens" in found:
            equal, margins = [], []
            for theirs, ours, told in zip(found["tokens"], expected, logits, strict=True):
                at = next((i for i in range(new) if theirs[i] != ours[i]), new)
                equal.append(at)
                if at < new:
                    own, other = told[at, ours[at]].item(), told[at, theirs[at]].item()
                    margins.append(round((own - other) / (abs(own) * precision), 2))
            found = {"equal": equal, "margins": margins}
        report[name] = found
        print(name, found, flush=True)
        save(report_path, report)


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
    settings = {"dtype": dtype, "max_num_batched_tokens": PAGE_SIZE, "max_num_seqs": 1, "max_logprobs": LIKELIEST}
    sampling = {"max_tokens": 1, "prompt_logprobs": LIKELIEST}
    told = child({"path": str(bundle), "settings": settings, "prompts": prompts, "sampling": sampling})
    loaded = load(bundle, dtype=getattr(torch, dtype))[0].to(device)
    source = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(device)
    decoders = [Decoder.plain(source), decoder_of(loaded)]
    rows = []
    for prompt, said in zip(prompts, told["logprobs"], strict=True):
        whole = torch.tensor([prompt], device=device)
        with torch.no_grad():
            exact, ours = (
                torch.cat([reader.score(part) for part in whole.split(PAGE_SIZE, 1)], 1)[0].cpu()
                for reader in (Reader(decoder, "decoder") for decoder in decoders)
            )
        for at in range(PAGE_SIZE, length - 1):
            likeliest = torch.tensor([int(token) for token in said[at]])
            theirs = torch.tensor([*said[at].values()])
            three = [_with_rest(x) for x in (exact[at][likeliest], ours[at][likeliest], theirs)]
            rows.append([_kl(three[0], three[1]), _kl(three[0], three[2]), _kl(exact[at], ours[at])])
    figures = torch.tensor(rows, dtype=torch.float64)
    apart = figures[:, 1] - figures[:, 0]
    names = "runtime", "vllm", "runtime_all"
    kl = {name: round(float(mean), 5) for name, mean in zip(names, figures.mean(0), strict=True)}
    return {"kl": kl, "tokens": len(rows), "vllm_less_runtime_se": round(float(apart.std() / len(rows) ** 0.5), 5)}


def _with_rest(logprobs: Any) -> Any:
    """Logarithms of probabilities, and that of all that is left."""
    rest = (1 - logprobs.exp().sum()).clamp(min=1e-9).log()
    return logprobs.new_tensor([*logprobs.tolist(), rest])


def _kl(p: Any, q: Any) -> float:
    return float((p.exp() * (p - q)).sum())


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        asked = json.load(sys.stdin)
        print("REPORT " + json.dumps((profiled if "profile" in asked else answers)(asked)), flush=True)
        return
    parser = option_parser(__doc__)
    parser.add_argument("what", choices=["tokens", "quality", "speed", "profile"])
    parser.add_argument("--model", type=Path, help="tokens and quality: the source of --bundle")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--text", type=Path, help="quality: a file of text")
    parser.add_argument("--segments", type=int, default=2, help="quality: of 512 tokens (default: 2)")
    parser.add_argument("--dtype", default="bfloat16", help="quality: of model and tokens (default: bfloat16)")
    parser.add_argument("--only", default="bf16,bundle,awq-fp8,bundle-piecewise,bundle-eager")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--memory", type=float, default=30, help="GiB of cache for each contender")
    parser.add_argument("--layers", type=int, default=8, help="profile: of the model (default: 8)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--together", action="store_true", help="speed: start all contenders before any is measured")
    parser.add_argument("--seconds", type=float, default=240, help="of each contender (default: 240)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    # Processes of vLLM's end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report: dict[str, Any] = {}
    if given.what == "tokens":
        compare(given.model, given.bundle, given.new_tokens, given.only.split(","), given.json)
        return
    if given.what == "quality":
        found = quality(given.model, given.bundle, given.text, given.segments, given.dtype)
        print(found)
        save(given.json, found)
        return
    mixed = mixed_load(0, 8 if given.tiny else 1, TINY["vocab_size"])
    contenders = []

    def contender_of(name: str) -> Contender:
        contenders.append(Contender(name, given.memory, given.seconds, mixed, given.tiny))
        return contenders[-1]

    ready: dict[str, Contender] = {}
    if given.together and given.what == "speed":
        ready = {name: contender_of(name) for name in given.only.split(",")}
        with ThreadPoolExecutor() as pool:
            for ended in [pool.submit(c.start, report.setdefault(c.name, {})) for c in ready.values()]:
                if isinstance(error := ended.exception(), BaseException):
                    print(error, file=sys.stderr)
        print("started", {name: found.get("start_s") for name, found in report.items()}, flush=True)
    for name in given.only.split(","):
        contender = ready.get(name) or contender_of(name)
        if given.what == "profile":
            report[name] = contender.profile(given.cases.split(","), given.layers)
            print_profile(name, report[name])
            save(given.json, report)
            continue
        try:
            contender.measure(given.cases.split(","), report.setdefault(name, {}), lambda: save(given.json, report))
        finally:
            for one in contenders if sys.exc_info()[0] else [contender]:
                one.stop()


if __name__ == "__main__":
    main()
