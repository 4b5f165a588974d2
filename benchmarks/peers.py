"""Other programs that quantize weights, each in the Python of its own environment (`calibrate_peers`)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import processes
from runner import ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

SCRIPTS = {
    program: ROOT / "benchmarks" / "calibrate_peers" / f"{file}.py"
    for program, file in {"llm-compressor": "llm_compressor", "GPTQModel": "gptqmodel"}.items()
}
IMPORTS = {
    "llm-compressor": "import llmcompressor.modifiers.transform.awq",
    "GPTQModel": "from gptqmodel import GPTQModel",
}
Run = Callable[[Sequence[object]], tuple[dict[str, Any], str]]


def quantize(
    program: str, python: Path, model: Path, ids: Path, folder: Path, settings: dict[str, Any], run: Run
) -> dict[str, Any]:
    """Quantize with one program into `folder`/model: what its process took, and what it says of itself.

    Args:
        program: a name in `SCRIPTS`.
        python: interpreter of its environment.
        model: directory of the source.
        ids: safetensors file with the token ids to calibrate on, int64 [samples, length].
        folder: is there, and takes the settings too.
        settings: method, bits, group_size, batch_size, dtype and device.
        run: runs a command to its end, as `processes.run` does.
    """
    (folder / "settings.json").write_text(json.dumps(settings))
    measured, said = run([python, SCRIPTS[program], "quantize", model, ids, folder / "model", folder / "settings.json"])
    return measured | json.loads(said.strip().splitlines()[-1])


def dequantized(program: str, python: Path, folder: Path, run: Run) -> dict[str, Tensor]:
    """All weights that `quantize` left in `folder`, float32, dequantized by the program's own code."""
    file = folder / "weights.safetensors"
    run([python, SCRIPTS[program], "dequantize", folder / "model", file])
    weights = load_file(file)
    file.unlink()
    return weights


def replace_weights(model: PreTrainedModel, weights: dict[str, Tensor], program: str) -> None:
    """Put in a model's place all the weights that a program saved (SystemExit if they are not just those)."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise SystemExit(f"{program} saved other tensors than the model's: {[*missing, *unexpected][:3]}")


def weights(
    program: str, python: Path, model: Path, ids: Tensor, settings: dict[str, Any], threads: int
) -> dict[str, Tensor]:
    """Both of these in a folder that is gone afterwards."""

    def run(command: Sequence[object]) -> tuple[dict[str, Any], str]:
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        return processes.run([str(part) for part in command], limits)

    with tempfile.TemporaryDirectory(prefix="kvconvert-peers-") as folder:
        place = Path(folder)
        save_file({"ids": ids.contiguous()}, place / "ids.safetensors")
        quantize(program, python, model, place / "ids.safetensors", place, settings, run)
        return dequantized(program, python, place, run)
