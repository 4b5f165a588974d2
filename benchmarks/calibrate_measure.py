"""How `benchmarks/calibrate.py` runs one program in fresh processes, and reads back the weights that it saved."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvconvert.convert.host_memory import anonymous_bytes
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight

PEER = Path(__file__).resolve().parent / "calibrate_peers" / "llm_compressor.py"
_PEER_IMPORTS = "from llmcompressor import oneshot; from llmcompressor.modifiers.transform.awq import AWQModifier"
_LOOK_S = 0.01


class Settings(NamedTuple):
    """What every program gets.

    Attributes:
        model: directory of the source.
        samples, length, seed: of the calibration text.
        calibration: SOURCE of that text; None takes what ships with kvconvert.
        bits, group_size: of the weights, asymmetric.
        device, threads: where and with how many threads to compute.
        peer_python: interpreter of llm-compressor's environment.
        peer_batch: sequences that llm-compressor runs at once; its own default is 1.
        peer_dtype: of llm-compressor's model; `auto` is its default, the checkpoint's own.
        timeout: seconds for one process.
    """

    model: Path
    samples: int
    length: int
    seed: int
    calibration: str | None
    bits: int
    group_size: int
    device: str
    threads: int
    peer_python: Path
    peer_batch: int
    peer_dtype: str
    timeout: float


def run(program: str, method: str, settings: Settings, ids: Path, folder: Path) -> dict[str, Any]:
    """Quantize with one program into `folder`: its processes' wall and processor time and peak anonymous memory."""
    folder.mkdir()
    if program == "llm-compressor":
        chosen = {
            "method": method,
            "bits": settings.bits,
            "group_size": settings.group_size,
            "batch_size": settings.peer_batch,
            "dtype": settings.peer_dtype,
            "device": settings.device,
        }
        (folder / "settings.json").write_text(json.dumps(chosen))
        files = [str(settings.model), str(ids), str(folder / "model"), str(folder / "settings.json")]
        measured, said = _process([str(settings.peer_python), str(PEER), "quantize", *files], settings, folder)
        return measured | json.loads(said.strip().splitlines()[-1])
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'[weights]\nmethod = "{method}"\nbits = {settings.bits}\ngroup_size = {settings.group_size}\n\n'
        '[kv]\npreset = "none"\n'
    )
    command = [sys.executable, "-m", "kvconvert"]
    sizes = ["--samples", str(settings.samples), "--seq-len", str(settings.length), "--seed", str(settings.seed)]
    source = [] if settings.calibration is None else ["--data", settings.calibration]
    options = ["--recipe", str(recipe), "--device", settings.device, *sizes, *source]
    command += ["convert", str(settings.model), str(folder / "model"), *options]
    return _process(command, settings, folder)[0]


def import_seconds(program: str, settings: Settings, folder: Path) -> float:
    """What a program's imports alone take in a process that finds their files in memory."""
    ours = [sys.executable, "-c", "import kvconvert.convert.pipeline, kvconvert.convert.export"]
    theirs = [str(settings.peer_python), "-c", f"{_PEER_IMPORTS}; from transformers import AutoModelForCausalLM"]
    for _ in range(2):
        measured, _ = _process(theirs if program == "llm-compressor" else ours, settings, folder)
    return measured["wall_s"]


def saved_model(program: str, settings: Settings, folder: Path) -> PreTrainedModel:
    """The source in float32 with all weights replaced by those that a program saved, dequantized in float32."""
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    if program == "llm-compressor":
        file = folder / "weights.safetensors"
        _process(
            [str(settings.peer_python), str(PEER), "dequantize", str(folder / "model"), str(file)], settings, folder
        )
        weights = load_file(file)
    else:
        weights = _bundle_weights(folder / "model")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise SystemExit(f"{program} saved other tensors than the model's: {[*missing, *unexpected][:3]}")
    return model.to(settings.device).eval()


def _bundle_weights(bundle: Path) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for file in sorted(bundle.glob("model*.safetensors")):
        stored |= load_file(file)
    dense = {name: tensor.float() for name, tensor in stored.items() if name.rpartition(".")[2] in ("weight", "bias")}
    for name in stored:
        linear, _, part = name.rpartition(".")
        if part == "qweight":
            packed = AwqWeight(*(stored[f"{linear}.{field}"] for field in AwqWeight._fields))
            dense[f"{linear}.weight"] = dequantize_weight(packed)
    return dense


def _process(command: list[str], settings: Settings, folder: Path) -> tuple[dict[str, float], str]:
    """Run a command to its end: what it took, and what it printed. Its messages are kept in `folder`."""
    environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads), "MKL_NUM_THREADS": str(settings.threads)}
    before, begun, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    said = folder / "stdout"
    with said.open("w") as out, (folder / "stderr").open("w") as messages:
        process = subprocess.Popen(command, stdout=out, stderr=messages, env=environment)
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid) or 0)
            if time.perf_counter() - begun > settings.timeout:
                process.kill()
                process.wait()
                raise SystemExit(f"{' '.join(command[:4])} took longer than {settings.timeout:.0f} s")
            time.sleep(_LOOK_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{(folder / 'stderr').read_text()[-2000:]}")
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begun
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    measured = {"wall_s": round(wall, 1), "processor_s": round(used, 1), "peak_anonymous_bytes": peak}
    return measured, said.read_text()
