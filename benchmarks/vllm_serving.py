"""vLLM in bf16, with AWQ weights and an fp8 cache, and with bundles, one after another on one GPU.

    python benchmarks/vllm_serving.py tokens --model MODEL --bundle BUNDLE
    python benchmarks/vllm_serving.py speed --only bf16,bundle --cases 1x1000,16x12000,mixed --json FILE

Needs vLLM in the same environment. `tokens` lets the runtime and vLLM continue the same texts greedily, in the model's
dtype, and says after how many tokens they part; rounding differs between engines, so that long answers may part where
two tokens are nearly as likely. `speed` takes random weights of an 8B Llama's shape (AWQ in groups of 128 and
`oscar-g128` for bundles) and a cache of --memory GiB for each: milliseconds until the first token and per token of
`ROWSxTOKENS`, and seconds for the load of traffic.py. Contenders: bf16, awq-fp8, bundle (graphs for decoding and
prompts), bundle-piecewise (for what is not attention), bundle-eager. Each has a process of its own; the first pass over
a case is not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from runner import option_parser, save

NEW_TOKENS = 64
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "dtype": "bfloat16",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEARS = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}
CONTENDERS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "awq-fp8": {"kv_cache_dtype": "fp8"},
    "bundle": {},
    "bundle-piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "bundle-eager": {"enforce_eager": True},
}


def write_model(folder: Path, contender: str) -> Path:
    """A directory from which vLLM takes shapes: a plain model, an AWQ checkpoint, or a bundle, all without weights."""
    config = dict(LLAMA_8B)
    if contender == "awq-fp8":
        config["quantization_config"] = {
            "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
    if contender.startswith("bundle"):
        write_bundle(folder, config)
    else:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_bundle(folder: Path, config: dict[str, Any]) -> None:
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

    scheme = KVScheme.preset("oscar-g128")
    modules, tensors = [], {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in LINEARS.items():
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
    layer = {"kv": scheme.to_dict(), "head_dim": 128, "num_key_value_heads": 8, "value_group_size": 32}
    layer["value_group_size"] = scheme.value_group_for(128)
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


def with_plugin(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """An environment in which vLLM finds the plugin, also where kvconvert is on the path without being installed."""
    if not any(point.name == "kvconvert" for point in entry_points(group="vllm.general_plugins")):
        info = folder / "kvconvert_plugin-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvconvert-plugin\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nkvconvert = kvconvert.vllm.plugin:register\n")
        environment = environment | {"PYTHONPATH": f"{folder}:{environment.get('PYTHONPATH', '')}"}
    return environment | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


def child(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run this file again for one contender; its last line is its report."""
    with tempfile.TemporaryDirectory() as folder:
        environment = with_plugin(dict(os.environ), Path(folder))
        ended = subprocess.run(
            [sys.executable, __file__, "child"], input=json.dumps(arguments), env=environment,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if line.startswith("REPORT ")]
    return json.loads(lines[-1].removeprefix("REPORT ")) if lines else {"failed": ended.returncode}


def measure(arguments: dict[str, Any]) -> dict[str, Any]:
    """Times of one contender, in a process of its own."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), arguments["contender"])
        llm = LLM(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=arguments["memory"] << 30,
            max_model_len=131072,
            enable_prefix_caching=False,
            **CONTENDERS[arguments["contender"]],
        )
    dice, report = random.Random(0), {}

    def prompt(length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [dice.randrange(3, 100000) for _ in range(length)]}

    def timed(prompts: list[Any], answers: list[int], **sampling: Any) -> float:
        settings = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **sampling) for n in answers]
        start = time.perf_counter()
        llm.generate(prompts, settings, use_tqdm=False)
        return time.perf_counter() - start

    for case in arguments["cases"]:
        for counted in (False, True):
            if case == "mixed":
                sizes, new = arguments["mixed"]
                seconds = timed([prompt(n) for n in sizes], new, temperature=0.8, top_p=0.95)
                found = {"seconds": round(seconds, 2)}
            else:
                rows, tokens = map(int, case.split("x"))
                first = timed([prompt(tokens) for _ in range(rows)], [1] * rows, temperature=0)
                whole = timed([prompt(tokens) for _ in range(rows)], [1 + NEW_TOKENS] * rows, temperature=0)
                found = {"first_ms": round(first * 1e3, 1), "token_ms": round((whole - first) * 1e3 / NEW_TOKENS, 3)}
            if counted:
                report[case] = found
                print(arguments["contender"], case, found, flush=True)
    return report


def answers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Greedy continuations by vLLM."""
    from vllm import LLM, SamplingParams

    llm = LLM(arguments["path"], max_model_len=4096, gpu_memory_utilization=0.4, **arguments["settings"])
    sampling = SamplingParams(temperature=0, max_tokens=arguments["new"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in arguments["prompts"]]
    return {"tokens": [list(x.outputs[0].token_ids) for x in llm.generate(prompts, sampling, use_tqdm=False)]}


def compare(model: Path, bundle: Path, new: int) -> dict[str, Any]:
    """After how many tokens vLLM with the plugin, and vLLM in the model's dtype, part from the runtime."""
    import torch
    from transformers import AutoTokenizer

    from kvconvert.runtime import load

    text = "".join(inspect.getsource(module) for module in (argparse, inspect))
    ids = AutoTokenizer.from_pretrained(bundle)(text)["input_ids"]
    prompts = [ids[start : start + length] for start, length in ((0, 100), (100, 700), (300, 1500), (50, 2100))]
    loaded = load(bundle, dtype="auto")[0].to("cuda" if torch.cuda.is_available() else "cpu")
    expected = []
    for prompt in prompts:
        whole = torch.tensor([prompt], device=loaded.device)
        answer = loaded.generate(whole, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        expected.append(answer[0, len(prompt) :].tolist())
    del loaded
    torch.cuda.empty_cache()
    report: dict[str, Any] = {"prompts": [len(prompt) for prompt in prompts], "new": new}
    contenders = {name: (bundle, given) for name, given in CONTENDERS.items() if name.startswith("bundle")}
    for name, (path, settings) in (contenders | {"source": (model, {})}).items():
        request = {"path": str(path), "settings": settings, "prompts": prompts, "new": new}
        found = child({"task": "answers"} | request)
        if "tokens" in found:
            pairs = zip(found["tokens"], expected, strict=True)
            found = {"equal": [next((i for i in range(new) if a[i] != b[i]), new) for a, b in pairs]}
        report[name] = found
        print(name, found, flush=True)
    return report


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        arguments = json.load(sys.stdin)
        found = (answers if arguments.get("task") == "answers" else measure)(arguments)
        print("REPORT " + json.dumps(found), flush=True)
        return
    parser = option_parser(__doc__)
    parser.add_argument("what", choices=["tokens", "speed"])
    parser.add_argument("--model", type=Path, help="tokens: the source of --bundle")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--cases", default="1x1000,1x30000,16x12000,mixed")
    parser.add_argument("--memory", type=int, default=30, help="GiB of cache for each contender")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    report: dict[str, Any] = {}
    if given.what == "tokens":
        report = compare(given.model, given.bundle, given.new_tokens)
    else:
        from traffic import lengths

        dice = random.Random(0)
        mixed = lengths(dice, 160, 128, 10_000, 366_374), lengths(dice, 160, 32, 360, 23_545)
        for contender in given.only.split(","):
            start = time.perf_counter()
            asked = {"contender": contender, "cases": given.cases.split(","), "memory": given.memory, "mixed": mixed}
            report[contender] = child(asked)
            print(contender, report[contender], f"{time.perf_counter() - start:.0f} s in all", flush=True)
            save(given.json, report)
    save(given.json, report)


if __name__ == "__main__":
    main()
