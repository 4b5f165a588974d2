"""vLLM in bf16, with AWQ weights and an fp8 cache, and with bundles, one after another on one GPU.

    python benchmarks/vllm_serving.py --only bf16,bundle --cases 1x1000,16x12000,mixed --json FILE

Needs vLLM in the same environment. Takes random weights of an 8B Llama's shape (AWQ in groups of 128 and `oscar-g128`
for bundles) and a cache of --memory GiB for each. Contenders: bf16, awq-fp8, bundle (graphs for decoding and prompts),
bundle-piecewise (for what is not attention), bundle-eager; and, if asked for, bundle-own-prompts (without
FlashAttention 3), bundle-mixed (layers of different widths, of as many bytes together, or with those of the bundle
that --widths-of names), bundle-ngram (with drafts of n-grams), bundle-2-gpus, bundle-per-head, the same with one GPU,
and hybrid, the shape of a 9B Qwen3.5 in bf16. Each is started once, with --together all of them at the same time before
any is measured. Cases: `ROWSxTOKENS` gives milliseconds until the last row's first token and per further token, medians
of five runs where they are short, `fullx8192` the same of as many rows as the cache holds, `mixed` seconds for the
requests of traffic.py, for the passes that read prompts (until the last first token), and the number of passes after
these, and `mixed-4` the same with 4 GiB of the cache. `kernels:CASE` and `functions:CASE` list what takes the time in a
case on one GPU, in milliseconds, under a profiler. A tenth of the mixed requests and a prompt of 9,000 tokens come
before all, and before the mixed load steps of 160 rows, 159, and so on; nothing comes before `first-mixed`, where it is
the first case. `NAME/CASE` is a case of one contender alone. Every figure is written at once; a case that fails, or has
no time left, says so, and the next one runs. --seconds is the time of each contender, its start included. With --tiny a
small model serves lengths divided by 8 on a CPU, which does everything and measures nothing.

vllm_answers.py compares answers with the runtime's. Compiled code stays in ~/.cache/vllm/torch_compile_cache
(VLLM_CACHE_ROOT) and ~/.triton/cache: a second start on the same machine is faster.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from mixed_load import SAMPLING, mixed_load
from runner import option_parser, save
from vllm_process import VLLM

NEW_TOKENS = 64
# The mixed load as the first that is served.
FIRST = "first-mixed"
# Rows of the mixed load.
MANY_ROWS = 160
# Prompt tokens of a case that is run several times.
SHORT = 30000
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
# Widths of layers as `auto` mixes them, of as many bits together as one scheme of 2.
MIXED: list[dict[str, Any]] = [
    {"key_bits": 3}, {"value_bits": 1}, {}, {"key_bits": 1}, {"value_bits": 3}, {"key_bits": 3, "value_bits": 1}
]  # fmt: skip
# A hybrid of linear attention and, in every fourth layer, attention to all tokens, of 9 billion parameters.
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
HYBRID_TINY = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
CONTENDERS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "awq-fp8": {"kv_cache_dtype": "fp8"},
    "bundle": {},
    "bundle-piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "bundle-eager": {"enforce_eager": True},
    "bundle-own-prompts": {"attention_config": {"flash_attn_version": 2}},
    "bundle-mixed": {},
    "bundle-ngram": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
    },
    "bundle-per-head": {},
    "bundle-2-gpus": {"tensor_parallel_size": 2},
    "hybrid": {},
}


def linears(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Input and output features of a layer's Linears."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    attention = {"q_proj": (hidden, heads), "k_proj": (hidden, kv_heads), "v_proj": (hidden, kv_heads)}
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    named = {f"self_attn.{name}": sizes for name, sizes in (attention | {"o_proj": (heads, hidden)}).items()}
    return named | {f"mlp.{name}": sizes for name, sizes in mlp.items()}


def write_model(folder: Path, contender: str, shape: dict[str, Any], widths: list[dict[str, Any]] = MIXED) -> Path:
    """A directory from which vLLM takes shapes: a plain model, an AWQ checkpoint, or a bundle, all without weights."""
    config = LLAMA_8B | shape
    if contender == "hybrid":
        config |= HYBRID | (shape and shape | HYBRID_TINY)
    if contender == "awq-fp8":
        config["quantization_config"] = {
            "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
    if contender.startswith("bundle"):
        norm = "per_head" if contender.endswith(("gpus", "head")) else "joint"
        write_bundle(folder, config, norm, widths if contender.endswith("mixed") else [{}])
    else:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_bundle(folder: Path, config: dict[str, Any], token_norm: str, widths: list[dict[str, Any]]) -> None:
    """A bundle's description: config.json, manifest and an empty KV plan beside the files that are there; layers have
    these widths in turn.
    """
    from kvconvert.bundle.locate import MANIFEST_NAME, PLAN_NAME
    from kvconvert.bundle.manifest import (
        FORMAT_VERSION,
        LayerPlan,
        Manifest,
        ModuleCoverage,
        quantization_config,
    )
    from kvconvert.bundle.statements import weights_info
    from kvconvert.cache import rotation_kinds
    from kvconvert.io.records import FileInfo, SourceInfo, TensorInfo
    from kvconvert.io.tensorfile import replace_tensors
    from kvconvert.methods import KVScheme

    preset = replace(KVScheme.preset("oscar-g128"), token_norm=token_norm)
    schemes = [replace(preset, **widths[i % len(widths)]) for i in range(config["num_hidden_layers"])]
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
    weights = weights_info(modules, tensors)
    config["quantization_config"] = quantization_config(weights, modules)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / PLAN_NAME).parent.mkdir()
    replace_tensors(folder / PLAN_NAME, {})
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        info = FileInfo(size=len(content), sha256=hashlib.sha256(content).hexdigest())
        files[path.relative_to(folder).as_posix()] = info
    head_dim = config["head_dim"]
    shape = {"head_dim": head_dim, "num_key_value_heads": config["num_key_value_heads"]}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        kvconvert_version="0",
        versions={},
        source=SourceInfo(id="random", config_sha256="0" * 64, weights_sha256={}),
        recipe={},
        data=None,
        transforms=list(dict.fromkeys(fold for scheme in schemes for fold in scheme.transforms())),
        conventions={},
        layers=[
            LayerPlan(
                index=index,
                kv=scheme.to_dict(),
                value_group_size=scheme.value_group_for(head_dim),
                **dict(zip(("rotation", "value_rotation"), rotation_kinds(scheme, head_dim, head_dim), strict=True)),
                **shape,
            )
            for index, scheme in enumerate(schemes)
        ],
        modules=modules,
        weights=weights,
        tensors=tensors,
        plan={},
        files=files,
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())


def widths_of(bundle: Path) -> list[dict[str, Any]]:
    """What decides on the bytes of each layer's cache in a bundle, and how its kernels read them."""
    from kvconvert.bundle.locate import MANIFEST_NAME

    each = "bits", "group_size", "scale_bits", "recent_tokens"
    names = [
        "rotate_keys",
        "token_norm",
        "boost_fraction",
        *(f"{side}_{name}" for side in ("key", "value") for name in each),
    ]
    layers = json.loads((bundle / MANIFEST_NAME).read_text())["layers"]
    return [{name: layer["kv"][name] for name in names} for layer in layers]


def engine_options(contender: str, memory: float, scale: int) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` besides the model; lengths divided by `scale`, `memory` GiB of cache."""
    return {
        "kv_cache_memory_bytes": int(memory * GIB),
        # Only a limit at the start, of all the GPU's memory; other work may have the rest.
        "gpu_memory_utilization": 0.1,
        "max_model_len": 131072 // scale,
        "max_num_seqs": 256 // scale,
        "max_num_batched_tokens": 8192 // scale,
        "max_cudagraph_capture_size": 256 // scale,
        "enable_prefix_caching": False,
        **CONTENDERS[contender],
    }


class Contender:
    """One way to serve, with its figures.

    Args:
        name: one of CONTENDERS.
        memory: GiB of its cache.
        seconds: that it has, its starts included.
        mixed: prompts and numbers of tokens to answer.
        tiny: whether the model is, and lengths are divided by 8.
        options: the keyword arguments of vLLM's `EngineArgs`, besides those of `engine_options`.
        widths: fields of the schemes of bundle-mixed's layers, used in turn.
    """

    def __init__(
        self,
        name: str,
        memory: float,
        seconds: float,
        mixed: list[tuple[list[int], int]],
        tiny: bool,
        options: dict[str, Any],
        widths: list[dict[str, Any]] = MIXED,
    ):
        self.name, self.memory, self.mixed, self.scale = name, memory, mixed, 8 if tiny else 1
        self.options = options
        self.shape = TINY if tiny else {}
        self._folder = tempfile.TemporaryDirectory()
        self.model = write_model(Path(self._folder.name), name, self.shape, widths)
        self.end = time.perf_counter() + seconds
        self.vllm: VLLM | None = None
        self.has_sampled = False

    def measure(self, cases: list[str], report: dict[str, Any], written: Callable[[], None]) -> None:
        """Fill `report` case by case, and call `written` after each; cases of other contenders are left out."""
        for case in (own for name, _, own in (case.rpartition("/") for case in cases) if name in ("", self.name)):
            try:
                if self.vllm is None:
                    self.start(report, is_warm=case != FIRST)
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

    def start(self, report: dict[str, Any], is_warm: bool = True) -> None:
        """Start vLLM and, if it is to be warm, serve some requests that are not measured."""
        left = self.end - time.perf_counter()
        if left < 1:
            sys.exit()
        self.vllm = VLLM("", self.model, engine_options(self.name, self.memory, self.scale) | self.options, left)
        report["start_s"], report["blocks"] = round(self.vllm.ready_seconds, 1), self.vllm.blocks
        self.has_sampled = False
        if not is_warm:
            return
        begin = time.perf_counter()
        few = [*self.mixed[::10], *requests_of(1, 9000 // self.scale)]
        self.vllm.serve(few, [0.0] * len(few), SAMPLING)
        report["warm_s"] = round(time.perf_counter() - begin, 1)

    def _run(self, case: str) -> dict[str, Any]:
        if case == FIRST:
            return self._run_once("mixed")
        if "mixed" in case and not self.has_sampled:
            # vLLM compiles its sampling anew for several ranges of rows, when one is first met.
            each = [(ids, answer) for answer, (ids, _) in enumerate(requests_of(MANY_ROWS // self.scale, 16), 1)]
            self.vllm.serve(each, [0.0] * len(each), SAMPLING)
            self.has_sampled = True
        what, profiled, watched = case.partition(":")
        if profiled:
            self.vllm.profile(what)
            return self._run_once(watched) | {what: self.vllm.profile("")}
        count, _, length = case.partition("x")
        is_short = count.isdecimal() and int(count) * int(length) <= SHORT
        runs = [self._run_once(case) for _ in range(5 if is_short else 1)]
        return {key: statistics.median(run[key] for run in runs) for key in runs[0]}

    def _run_once(self, case: str) -> dict[str, Any]:
        if case.startswith("mixed"):
            share = float(case.partition("-")[2] or self.memory) / self.memory
            self.vllm.limit(int(self.vllm.blocks * share))
            told, seconds = self.vllm.serve(self.mixed, [0.0] * len(self.mixed), SAMPLING)
            self.vllm.limit(self.vllm.blocks)
            last = max(times[0] for times in told)
            return {
                "seconds": round(seconds, 2),
                "prompts_s": round(last, 2),
                "further_passes": len({at for times in told for at in times if at > last}),
                "first_token_p50_s": round(statistics.median(times[0] for times in told), 2),
            }
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
        """Number of requests with prompts of `tokens` tokens that the cache holds at a time, answers included."""
        if not self.name.startswith("bundle"):

            def blocks_for(count: int) -> int:
                return -(-count // self.vllm.block_tokens)
        else:
            import torch

            from kvconvert.vllm.bundle import served_bundle

            ranks = CONTENDERS[self.name].get("tensor_parallel_size", 1)
            blocks_for = served_bundle(str(self.model)).layouts(torch.bfloat16, ranks)[0].blocks_for
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


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--only", default="bf16,bundle,awq-fp8,bundle-piecewise,bundle-eager")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--memory", type=float, default=30, help="GiB of cache for each contender")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--together", action="store_true", help="start all contenders before any is measured")
    parser.add_argument("--seconds", type=float, default=240, help="of each contender (default: 240)")
    parser.add_argument("--options", type=json.loads, default={}, help="of vLLM's EngineArgs, as JSON")
    parser.add_argument("--widths-of", type=Path, metavar="BUNDLE", help="for the layers of bundle-mixed, in turn")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    widths = widths_of(given.widths_of) if given.widths_of else MIXED
    # Processes of vLLM's end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report: dict[str, Any] = {}
    mixed = mixed_load(0, 8 if given.tiny else 1, TINY["vocab_size"])
    contenders = []

    def contender_of(name: str) -> Contender:
        contenders.append(Contender(name, given.memory, given.seconds, mixed, given.tiny, given.options, widths))
        return contenders[-1]

    ready: dict[str, Contender] = {}
    if given.together:
        ready = {name: contender_of(name) for name in given.only.split(",")}
        with ThreadPoolExecutor() as pool:
            for ended in [pool.submit(c.start, report.setdefault(c.name, {})) for c in ready.values()]:
                if isinstance(error := ended.exception(), BaseException):
                    print(error, file=sys.stderr)
        print("started", {name: found.get("start_s") for name, found in report.items()}, flush=True)
    for name in given.only.split(","):
        contender = ready.get(name) or contender_of(name)
        try:
            contender.measure(given.cases.split(","), report.setdefault(name, {}), lambda: save(given.json, report))
        finally:
            for one in contenders if sys.exc_info()[0] else [contender]:
                one.stop()


if __name__ == "__main__":
    main()
