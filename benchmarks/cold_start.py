"""A new process until its first token, and its passes while it serves, with and without compiled kernels on the disk.

    python benchmarks/cold_start.py --json benchmarks/results/cold_start.json
    python benchmarks/cold_start.py --tiny                 # under a minute on a CPU: does everything, measures nothing

Writes a random bundle of an 8B Llama's shape (4-bit weights in groups of 128, `oscar-g128`; 5 GB) and starts three
processes on it, one after another: with an empty cache of Triton's, with what the first left there, and with what
`kvconvert warm` compiles into an empty one. Each loads the bundle, makes an Engine and answers a prompt of 1,000
tokens; the second one then serves requests as those of benchmarks/traffic.py, which come with exponential gaps, for
--seconds. A pass is compared with the median of its kind, by prompt tokens. On an H200 all takes about three minutes
more than --seconds. With `--cache DIR` there is one process, with what a folder of Triton's holds.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEGIN = time.perf_counter()
CHUNK, ROWS, GIB = 2048, 64, 1 << 30


def child(directory: str, seconds: float, rate: float, tiny: bool) -> None:
    """Measure in one process and print JSON."""
    import gc
    import random

    import torch
    from traffic import requests_of, serve

    from kvconvert.runtime import Engine, load

    times = {"imports": time.perf_counter() - BEGIN}
    scale, on_gpu = (8, False) if tiny else (1, True)
    begin = time.perf_counter()
    model, _ = load(directory, dtype="auto")
    if on_gpu:
        from kvconvert.runtime.hf.fuse import fuse

        model.to("cuda")
        fuse(model)
        torch.cuda.synchronize()
    times["load"] = time.perf_counter() - begin
    begin = time.perf_counter()
    engine = Engine(model, kv_memory=30 * GIB if on_gpu else None, max_batch=ROWS // scale, prompt_chunk=CHUNK // scale)
    times["engine"] = time.perf_counter() - begin
    begin = time.perf_counter()
    dice, vocabulary = random.Random(0), model.config.vocab_size
    prompt = dice.choices(range(5, vocabulary), k=1000 // scale)
    next(engine.stream(engine.add(prompt, max_new_tokens=2, stop_token_ids=[])))
    times["first token"] = time.perf_counter() - begin
    times["in all"] = time.perf_counter() - BEGIN
    report: dict[str, Any] = {"seconds": times}
    if seconds:
        arrivals, requests, now = [], [], 0.0
        while now < seconds:
            arrivals.append(now)
            now += dice.expovariate(rate)
        while len(requests) < len(arrivals):
            requests += requests_of(0, scale, vocabulary, draw=len(requests))
        engine.run()
        # As `kvconvert serve` does; the requests to come are a client's.
        gc.collect()
        gc.freeze()
        served = serve(engine, requests[: len(arrivals)], arrivals)
        report["served"] = served
        report["longest over median"] = max(
            kind["longest_ms"] / kind["median_ms"] for kind in served["passes"].values() if kind["passes"] >= 10
        )
    print(json.dumps(report))


def write_bundle(directory: Path, tiny: bool) -> None:
    """A random bundle; its tokenizer is the reference model's."""
    import torch
    from engine_models import GROUP_SIZE, SCALE, llama_8b
    from transformers.models.auto import AutoModelForCausalLM

    from kvconvert.bundle.locate import PLAN_NAME
    from kvconvert.bundle.manifest import (
        FORMAT_VERSION,
        LayerPlan,
        Manifest,
        ModuleCoverage,
        quantization_config,
    )
    from kvconvert.bundle.statements import weights_info
    from kvconvert.bundle.writer import copy_file, write_json, write_manifest, write_weights
    from kvconvert.cache import rotation_kinds
    from kvconvert.io.records import DataInfo, SourceInfo, TensorInfo
    from kvconvert.io.tensorfile import write_tensors
    from kvconvert.methods import KVScheme

    config = llama_8b()
    if tiny:
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
        config = llama_8b(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    infos, modules = {}, []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            inputs, outputs = module.in_features, module.out_features
            rows = {"qweight": inputs, "qzeros": inputs // GROUP_SIZE}
            infos |= {f"{name}.{p}": TensorInfo(dtype="I32", shape=[n, outputs // 8]) for p, n in rows.items()}
            infos[f"{name}.scales"] = TensorInfo(dtype="F16", shape=[inputs // GROUP_SIZE, outputs])
            sizes = {"bits": 4, "group_size": GROUP_SIZE, "in_features": inputs, "out_features": outputs}
            modules.append(ModuleCoverage(name=name, method="awq", **sizes))
        elif dict(module.named_parameters(recurse=False)):
            infos[f"{name}.weight"] = TensorInfo(dtype="BF16", shape=list(module.weight.shape))
            if name in ("model.embed_tokens", "lm_head"):
                kind = {"kind": "embedding"} if name != "lm_head" else {}
                modules.append(ModuleCoverage(name=name, method="kept", reason="outside the decoder layers", **kind))
    generator = torch.Generator().manual_seed(0)

    # Gigabytes of numbers of their own would take a minute.
    codes = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 20,), dtype=torch.int32, generator=generator)
    normal = torch.randn(1 << 20, generator=generator).mul_(0.02).bfloat16()

    def filled(block: torch.Tensor, shape: list[int]) -> torch.Tensor:
        return block.repeat(-(-math.prod(shape) // len(block)))[: math.prod(shape)].view(shape)

    def tensor(name: str) -> torch.Tensor:
        shape = infos[name].shape
        if name.endswith("qweight"):
            return filled(codes, shape)
        if name.endswith("qzeros"):
            return torch.full(shape, -2004318072, dtype=torch.int32)
        if name.endswith("scales"):
            return torch.full(shape, SCALE, dtype=torch.float16)
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return filled(normal, shape)

    directory.mkdir()
    files = write_weights(directory, infos, tensor)
    (directory / PLAN_NAME).parent.mkdir()
    files[PLAN_NAME] = write_tensors(directory / PLAN_NAME, {}, tensor)
    weights = weights_info(modules, infos)
    stated = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    stated["quantization_config"] = quantization_config(weights, modules)
    files["config.json"] = write_json(directory / "config.json", stated)
    reference = Path(__file__).resolve().parent.parent / "examples" / "reference-lm"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files[name] = copy_file(reference / name, directory / name)
    scheme = KVScheme.preset("oscar-g128").with_online_rotation()
    layer = {"kv": scheme.to_dict(), "head_dim": config.head_dim, "num_key_value_heads": config.num_key_value_heads}
    layer["value_group_size"] = min(128, config.head_dim)
    layer["rotation"], layer["value_rotation"] = rotation_kinds(scheme, config.head_dim, config.head_dim)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        kvconvert_version="0",
        versions={},
        source=SourceInfo(id="random", config_sha256="0" * 64, weights_sha256={"model.safetensors": "1" * 64}),
        recipe={"name": "random"},
        data=DataInfo(source="none", samples=1, length=8, seed=0, sha256="2" * 64),
        transforms=list(scheme.transforms()),
        conventions={"page_tokens": 128},
        layers=[LayerPlan(index=i, **layer) for i in range(config.num_hidden_layers)],
        modules=modules,
        weights=weights,
        tensors=infos,
        plan={},
        files=files,
        informative=[],
    )
    write_manifest(directory, manifest)


def start(bundle: Path, cache: Path, seconds: float, rate: float, tiny: bool) -> dict[str, Any]:
    """One process on a bundle."""
    command = [sys.executable, __file__, "--child", str(bundle), "--seconds", str(seconds), "--rate", str(rate)]
    done = subprocess.run(
        [*command, *(["--tiny"] if tiny else [])],
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    print(done.stdout.splitlines()[-1], flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    from runner import machine, need_gpu, option_parser, save

    parser = option_parser(__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    parser.add_argument("--seconds", type=float, default=120.0, help="of serving (default: 120)")
    parser.add_argument("--cache", type=Path, help="start one process on this cache of Triton's, and serve in it")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second (default: 5)")
    arguments = parser.parse_args()
    if not arguments.tiny:
        need_gpu()
    results: dict[str, Any] = {"machine": "CPU" if arguments.tiny else machine()}
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "bundle")
        write_bundle(bundle, arguments.tiny)
        options = {"rate": arguments.rate, "tiny": arguments.tiny}
        if arguments.cache is not None:
            results["compiled by a process before"] = start(bundle, arguments.cache, arguments.seconds, **options)
            save(arguments.json, results)
            return
        first = Path(folder, "first")
        results["nothing compiled"] = start(bundle, first, 0, **options)
        results["compiled by a process before"] = start(bundle, first, arguments.seconds, **options)
        if not arguments.tiny:  # there is nothing to warm without a GPU
            warmed, begin = Path(folder, "warmed"), time.perf_counter()
            command = [sys.executable, "-m", "kvconvert", "warm", str(bundle), "--cache", str(warmed)]
            subprocess.run(command, check=True)
            results["kvconvert warm"] = {"seconds": time.perf_counter() - begin}
            results["compiled by kvconvert warm"] = start(bundle, warmed, 0, **options)
    print(json.dumps(results, indent=1))
    save(arguments.json, results)


if __name__ == "__main__":
    if "--child" in sys.argv:
        at = {name: sys.argv[sys.argv.index(name) + 1] for name in ("--child", "--seconds", "--rate")}
        child(at["--child"], float(at["--seconds"]), float(at["--rate"]), "--tiny" in sys.argv)
    else:
        main()
