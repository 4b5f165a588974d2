"""Convert the model families that are served most, as published, and print for each what kvconvert does with it.

python tests/published/families.py [FAMILY ...]

Every bundle's logits are compared with transformers' in float32, with tokens in pages of 16 bits: at once, in
`generate`, and in an Engine whose requests join, leave, and share prefixes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig

from kvconvert.models.configuration import model_class

sys.path += [str(Path(__file__).resolve().parents[1] / part) for part in (".", "test_models")]
from published.models import published
from sweep import conversion

FAMILIES: dict[str, tuple[str, ...]] = {
    "Qwen3": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B"),
    "Llama 3": ("meta-llama/Llama-3.2-1B-Instruct",),
    "GLM-4.6, 4.7": ("zai-org/GLM-4.7",),
    "MiniMax M2": ("MiniMaxAI/MiniMax-M2",),
    "Ministral 3": ("mistralai/Ministral-3-8B, with transformers' sizes",),
    "Hy3": ("tencent/Hy3-preview",),
    "Qwen3.5": ("Qwen/Qwen3.5-27B, its text model with transformers' sizes", "Qwen/Qwen3.5-35B-A3B, its text model"),
    "Qwen3.6": ("Qwen/Qwen3.6-35B-A3B, with transformers' sizes",),
    "Qwen3.8": ("Qwen/Qwen3.8, with transformers' sizes",),
    "Qwen3-Next": ("Qwen/Qwen3-Next-80B-A3B-Instruct",),
    "Nemotron 3": ("nvidia/Nemotron-3, experts of 7,680 instead of 7,688",),
    "gpt-oss": ("openai/gpt-oss-20b",),
    "Gemma 4": ("google/gemma-4-31B-it, its text model", "google/gemma-4-26B-A4B-it, its text model"),
    "Step 3": ("stepfun-ai/Step-3.7-Flash",),
    "MiMo-V2": ("XiaomiMiMo/MiMo-V2-Flash",),
    "Laguna": ("poolside/Laguna, with transformers' sizes",),
    "Kimi K2": ("moonshotai/Kimi-K2.5",),
    "GLM-4.7-Flash": ("zai-org/GLM-4.7-Flash",),
    "Mistral Small 4, Large 3": ("mistralai/Mistral-Small-4, with transformers' sizes",),
    "DeepSeek V3.2": ("deepseek-ai/DeepSeek-V3.2",),
    "GLM-5": ("zai-org/GLM-5",),
    "MiniMax M3": ("MiniMaxAI/MiniMax-M3",),
    "Kimi Linear": ("moonshotai/Kimi-Linear-48B-A3B-Instruct",),
    "DeepSeek V4": ("deepseek-ai/DeepSeek-V4-Flash",),
    "Qwen4-exp": ("Qwen/Qwen4-Exp, its text model with transformers' sizes",),
}
SERVED = "weights and cache"
REFUSED = ("DeepSeek V4", "Qwen4-exp")  # residual streams beside one another


def outcome(name: str, directory: Path) -> str:
    """`conversion` of a published model."""
    source = published(name).write(directory / "source")
    config = AutoConfig.from_pretrained(source)
    model = model_class(config).from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    return conversion(model.eval(), source)


def main() -> None:
    counts = [0, 0, 0]
    for family in sys.argv[1:] or FAMILIES:
        found = []
        for name in FAMILIES[family]:
            with tempfile.TemporaryDirectory() as directory:
                found.append(outcome(name, Path(directory)))
        said = next((each for each in found if each != SERVED), SERVED)
        done = (said.startswith("weights"), said == SERVED, said.startswith((SERVED, "cache alone: ")))
        counts = [count + each for count, each in zip(counts, done, strict=True)]
        print(" | ".join([family, *("yes" if each else "no" for each in done), said]), flush=True)
    print(f"weights {counts[0]}, Engine {counts[1]}, generate {counts[2]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
