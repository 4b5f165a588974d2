"""What each treatment of keys costs a model, all layers alike or each with its best, by simulation.

Run: python benchmarks/simulated_treatments.py MODEL --text DIR [--length 1540 --samples 3 --preset default]

DIR holds books-calib.txt, on which treatments, error feedback and clip ratios are fitted (512 tokens a sample), and
wikitext2-test.txt; code is the running Python's standard library. One sequence of each text, scored from token 128 on,
runs through the model's attention with pages as a cache returns them; weights stay as they are. Prints mean KL in nats.
"""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path

import torch
from runner import option_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.auto.layers import SearchedLayer, measured_layer
from kvconvert.auto.model import SimulatedModel
from kvconvert.calibration.clip_ratios import key_clip_ratio_errors, value_clip_ratio_errors
from kvconvert.calibration.simulated_attention import SIMULATED_ATTENTION
from kvconvert.methods import KVScheme, preset_calibration
from kvconvert.methods.key_treatments import treatments
from kvconvert.models.configuration import changing_rope

SAMPLE, SCORED_FROM = 512, 128
GRID = (1.0, 0.9, 0.8)


@torch.no_grad()
def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1540)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--preset", default="default")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation=SIMULATED_ATTENTION
    )
    model = model.eval().to(device)
    base = next(m for m in model.children() if hasattr(m, "layers"))
    simulated = SimulatedModel(model, base.layers)

    def ids(text: str, tokens: int) -> torch.Tensor:
        return torch.tensor([tokenizer(text[: 8 * tokens])["input_ids"][:tokens]])

    code = "".join(p.read_text(errors="ignore") for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[5:])
    novels = ids((args.text / "books-calib.txt").read_text(), args.samples * SAMPLE).view(-1, SAMPLE)
    wikitext = (args.text / "wikitext2-test.txt").read_text()
    fitted_on = simulated.read(novels, SAMPLE)
    scored = [simulated.read(ids(text, args.length), SCORED_FROM) for text in (wikitext, code)]
    scheme = replace(KVScheme.preset(args.preset), rotate_keys="none", token_norm="none", key_center="none")
    caches: dict[str, dict[int, object]] = {"each layer's best": {}}
    for index, layer in enumerate(base.layers):
        call = simulated.attention_call(fitted_on, index)
        heads, dim = call.keys.shape[1::2]
        output = next(m for name, m in layer.named_modules() if name.endswith((".o_proj", ".dense", ".out_proj")))
        searched = SearchedLayer(index, scheme, preset_calibration(args.preset), heads, dim, (), (), {})
        fit = measured_layer(searched, call, output.weight, fitted_on.embeddings[index], changing_rope(model.config))
        choices = treatments(scheme, dim)
        best, errors = fit.best(scheme, choices)
        values = value_clip_ratio_errors(fit.sample(False), fit.format_of(scheme), GRID)
        for choice in choices:
            if choice.name not in errors:
                continue
            treated = replace(choice.over(scheme), value_clip_ratio=GRID[int(values.argmin())])
            cache = fit.format_of(treated)
            ratios = key_clip_ratio_errors(fit.sample(cache.rotations.keys), cache, GRID)
            cache = fit.format_of(replace(treated, key_clip_ratio=GRID[int(ratios.argmin())]))
            caches.setdefault(choice.name, {})[index] = cache
            if choice is best:
                caches["each layer's best"][index] = cache
        fit.drop_sample()
        print(f"layer {index}: {best.name}", flush=True)
    print("| keys of all layers | KL WikiText-2 | KL code |\n|---|---|---|")
    for name, found in caches.items():
        print(f"| {name} | {' | '.join(f'{simulated.divergence(text, found):.4f}' for text in scored)} |", flush=True)


if __name__ == "__main__":
    main()
