"""How many calibration tokens an expert needs of its own before they serve it better than the whole layer's.

    python benchmarks/expert_tokens.py [--json benchmarks/results/expert_tokens.json]

The reference model has no experts, but its MLPs can be taken for some: the tokens of a layer's MLP input fall into 16
clusters (k-means of the directions), as a router that specialises would divide them, and the MLP is the expert of each;
the largest eight are taken.
Scale (up -> down) and clips are then searched on n tokens of a cluster, or on 2048 tokens of the whole layer, and the
4-bit MLP's error is taken on tokens of that cluster that nothing was searched on. Figures are the error with the
expert's own n tokens over the error with the layer's tokens, geometric means over clusters and layers; below 1 the
expert's own are better.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from runner import option_parser, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.calibration.activations import ActivationRecorder
from kvconvert.calibration.awq_clips import apply_clips, search_clips
from kvconvert.calibration.awq_scales import search_scales
from kvconvert.calibration.awq_scaling import apply_scales
from kvconvert.data.text import load_token_samples
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.models.structure import LayerStructure, NormGroup, Projection, ScalingPair

MODEL = Path(__file__).resolve().parent.parent / "examples" / "reference-lm"
LAYERS, CLUSTERS, TAKEN, HELD_OUT = (1, 4), 16, 8, 512
COUNTS = (16, 32, 64, 128, 256)
EXPERT = LayerStructure(
    attention="gate_proj",  # takes no part: nothing is scaled through it
    query=None,
    key=None,
    value=None,
    output="down_proj",
    norm_groups=(NormGroup(None, ("gate_proj", "up_proj"), (), unsupported_reason="shared by the whole layer"),),
    pairs=(ScalingPair(Projection("up_proj"), "down_proj"),),
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=1,
)


def clusters(x: Tensor) -> list[Tensor]:
    """Tokens [n, hidden] by the nearest of CLUSTERS centres, largest cluster first."""
    directions = nn.functional.normalize(x, dim=-1)
    centres = directions[torch.randperm(len(x), generator=torch.manual_seed(0))[:CLUSTERS]]
    for _ in range(20):
        nearest = (directions @ centres.T).argmax(-1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, directions)
        centres = nn.functional.normalize(sums, dim=-1)
    return sorted((x[nearest == c] for c in range(CLUSTERS)), key=len, reverse=True)


def error(mlp: nn.Module, seen: Tensor, held_out: Tensor, group_size: int) -> float:
    """Mean squared error on `held_out` of the MLP that was quantized after a search on `seen`."""
    expected, original = mlp(held_out), {name: w.clone() for name, w in mlp.state_dict().items()}
    recorder = ActivationRecorder(EXPERT, 1, len(seen), group_size)
    with recorder.attached(mlp):
        mlp(seen[None])
    observed = recorder.result()
    scalings, _ = search_scales(mlp, EXPERT, observed, 4, group_size)
    clips = search_clips(mlp, EXPERT, observed, scalings, 4, group_size)
    apply_scales(mlp, EXPERT, scalings, torch.float32)
    apply_clips(mlp, clips, group_size)
    for name in EXPERT.linears:
        linear = mlp.get_submodule(name)
        linear.weight.copy_(fake_quantize_weight(linear.weight, 4, group_size))
    found = float((mlp(held_out) - expected).square().mean())
    mlp.load_state_dict(original)
    return found


@torch.no_grad()
def measure(group_size: int) -> dict[int, float]:
    """The quotient of errors for each count."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = load_token_samples(None, AutoTokenizer.from_pretrained(MODEL), 48, 512, 0).ids
    inputs: dict[int, list[Tensor]] = {layer: [] for layer in LAYERS}
    hooks = [
        model.model.layers[layer].mlp.register_forward_pre_hook(lambda m, args, kept=kept: kept.append(args[0]))
        for layer, kept in inputs.items()
    ]
    for batch in ids.split(8):
        model(batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    logs: dict[int, list[float]] = {count: [] for count in COUNTS}
    for layer, kept in inputs.items():
        x = torch.cat(kept).flatten(0, 1)
        x = x[torch.randperm(len(x), generator=torch.manual_seed(1))]
        mlp = model.model.layers[layer].mlp
        for tokens in clusters(x)[:TAKEN]:
            if len(tokens) < HELD_OUT + COUNTS[-1]:
                continue
            held_out, own = tokens[:HELD_OUT], tokens[HELD_OUT:]
            pooled = error(mlp, x[:2048], held_out, group_size)
            for count in COUNTS:
                logs[count].append(math.log(error(mlp, own[:count], held_out, group_size) / pooled))
    return {count: math.exp(sum(values) / len(values)) for count, values in logs.items()}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--json", type=Path)
    results = {str(group_size): measure(group_size) for group_size in (64, 128)}
    print("own tokens      " + "".join(f"{count:>8}" for count in COUNTS))
    for group_size, row in results.items():
        print(f"groups of {group_size:>4}  " + "".join(f"{row[count]:8.3f}" for count in COUNTS))
    output = parser.parse_args().json
    save(output, results)


if __name__ == "__main__":
    main()
