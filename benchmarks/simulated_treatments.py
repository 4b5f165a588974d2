"""What each treatment of keys costs a model, all layers alike or each with its best, by simulation.

Run: python benchmarks/simulated_treatments.py MODEL --text DIR [--length 1540 --samples 3 --preset default]

DIR holds books-calib.txt, on which treatments, error feedback and clip ratios are fitted (512 tokens a sample), and
wikitext2-test.txt; code is the running Python's standard library. One sequence of each text, scored from token 128 on,
runs through the model's attention with pages as a cache returns them; weights stay as they are. Prints mean KL in nats.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from runner import option_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.auto.layers import SearchedLayer, measured_layer
from kvconvert.auto.model import ExactText, SimulatedModel
from kvconvert.calibration.clip_ratios import key_clip_ratio_errors, value_clip_ratio_errors
from kvconvert.calibration.key_treatments import TreatmentSearch
from kvconvert.calibration.simulated_attention import SIMULATED_ATTENTION
from kvconvert.methods import KVScheme, preset_calibration
from kvconvert.methods.auto import Candidate
from kvconvert.methods.key_treatments import treatments
from kvconvert.models.configuration import changing_rope

# Tokens of a calibration sample; the first token that is scored.
SAMPLE, SCORED_FROM = 512, 128
GRID = (1.0, 0.9, 0.8)


class Simulation(SimulatedModel):
    """A model in float32 whose attention sees pages as a cache returns them, with its tokenizer."""

    def __init__(self, directory: Path, device: str = "cpu"):
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=SIMULATED_ATTENTION
        )
        model = model.eval().to(device)
        super().__init__(model, next(m for m in model.children() if hasattr(m, "layers")).layers)

    def measured_layers(
        self,
        text: ExactText,
        scheme: KVScheme,
        preset: str,
        keys: tuple[Candidate, ...] = (),
        values: tuple[Candidate, ...] = (),
        context: int = 0,
    ) -> Iterator[tuple[SearchedLayer, TreatmentSearch]]:
        """Each layer, and what its candidates are fitted with; its sample is dropped when the next is asked for."""
        for index, layer in enumerate(self.layers):
            call = self.attention_call(text, index)
            heads, dim = call.keys.shape[1::2]
            plain = SearchedLayer(index, scheme, preset_calibration(preset), heads, dim, keys, values, {}, context)
            plain = replace(plain, costs={c.name: plain.cost_of(c) for c in plain.candidates})
            output = next(m for name, m in layer.named_modules() if name.endswith((".o_proj", ".dense", ".out_proj")))
            fit = measured_layer(plain, call, output.weight, text.embeddings[index], changing_rope(self.model.config))
            yield plain, fit
            fit.drop_sample()


def library_code() -> str:
    """The running Python's standard library, without its first files."""
    return "".join(p.read_text(errors="ignore") for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[5:])


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
    simulated = Simulation(args.model, device)

    def ids(text: str, tokens: int) -> torch.Tensor:
        return torch.tensor([simulated.tokenizer(text[: 8 * tokens])["input_ids"][:tokens]])

    novels = ids((args.text / "books-calib.txt").read_text(), args.samples * SAMPLE).view(-1, SAMPLE)
    wikitext = (args.text / "wikitext2-test.txt").read_text()
    fitted_on = simulated.read(novels, SAMPLE)
    scored = [simulated.read(ids(text, args.length), SCORED_FROM) for text in (wikitext, library_code())]
    scheme = replace(KVScheme.preset(args.preset), rotate_keys="none", token_norm="none", key_center="none")
    caches: dict[str, dict[int, object]] = {"each layer's best": {}}
    for layer, fit in simulated.measured_layers(fitted_on, scheme, args.preset):
        choices = treatments(scheme, layer.head_dim)
        best, errors = fit.best(scheme, choices)
        values = value_clip_ratio_errors(fit.sample(False), fit.format_of(scheme), GRID)
        for choice in choices:
            if choice.name not in errors:
                continue
            treated = replace(choice.over(scheme), value_clip_ratio=GRID[int(values.argmin())])
            cache = fit.format_of(treated)
            ratios = key_clip_ratio_errors(fit.sample(cache.rotations.keys), cache, GRID)
            cache = fit.format_of(replace(treated, key_clip_ratio=GRID[int(ratios.argmin())]))
            caches.setdefault(choice.name, {})[layer.index] = cache
            if choice is best:
                caches["each layer's best"][layer.index] = cache
        print(f"layer {layer.index}: {best.name}", flush=True)
    print("| keys of all layers | KL WikiText-2 | KL code |\n|---|---|---|")
    for name, found in caches.items():
        print(f"| {name} | {' | '.join(f'{simulated.divergence(text, found):.4f}' for text in scored)} |", flush=True)


if __name__ == "__main__":
    main()
