"""What calibrating the cache is worth: KL from full precision on held-out text, with and without it.

    python benchmarks/kv_calibration.py [ranges|kitty|tau|budgets ...] [--json benchmarks/results/kv_calibration.json]

Calibrated on the embedded calibration text (16 samples of 512 tokens), measured on the embedded evaluation text (8
segments of 1024) in float32, weights as they are, values rotated at run time. Page methods read 128 tokens before
scoring begins, whole-prompt methods 512, which are then sealed. One seed; differences of a few percent are within the
text's noise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvconvert.convert.pipeline import calibrate
from kvconvert.convert.recipe import KVCalibration, Recipe, WeightsRecipe
from kvconvert.data.text import load_token_samples
from kvconvert.fidelity.scoring import Decoder, compare
from kvconvert.methods import PRESETS, KVScheme
from kvconvert.runtime import KVCache

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "reference-lm"
NONE = KVCalibration(calibrate_clip_ratios=False, given=["key_rounding", "tau1", "tau2"])
RANGES = KVCalibration(given=["key_rounding", "tau1", "tau2"])
TAU = KVCalibration(calibrate_clip_ratios=False, given=["key_rounding"])
BOTH = KVCalibration(given=["key_rounding"])

OSCAR_128 = PRESETS["oscar-g128"]
KITTY, KITTY_PRO = PRESETS["kitty"], PRESETS["kitty-pro"]
MINIKV = replace(PRESETS["minikv"], heavy_ratio=0.15, recent_ratio=0.1)


def full_range(scheme: KVScheme) -> KVScheme:
    return replace(scheme, key_clip_ratio=1.0, value_clip_ratio=1.0, tau1=0.0, tau2=0.0)


Cases = dict[str, tuple[KVScheme, KVCalibration]]


def range_cases() -> Cases:
    schemes = {name: PRESETS[name] for name in ("oscar", "oscar-g128", "kivi", "kitty", "kitty-pro")}
    schemes["oscar-g128, 1 bit"] = replace(OSCAR_128, key_bits=1, value_bits=1)
    schemes["oscar-g128, 4 bit"] = replace(OSCAR_128, key_bits=4, value_bits=4)
    cases = {f"{name}, r = 1": (scheme, NONE) for name, scheme in schemes.items()}
    cases |= {f"{name}, calibrated": (scheme, BOTH) for name, scheme in schemes.items()}
    for name, r in (("oscar-g128", 0.85), ("oscar-g128, 1 bit", 0.5)):
        cases[f"{name}, r = {r}"] = (replace(schemes[name], key_clip_ratio=r, value_clip_ratio=r), NONE)
    return dict(sorted(cases.items()))


def kitty_cases() -> Cases:
    return {
        f"{name}, {select}": (replace(scheme, boost_select=select), NONE)
        for name, scheme in (("kitty", KITTY), ("kitty-pro", KITTY_PRO))
        for select in ("dynamic", "calibrated")
    }


def tau_cases() -> Cases:
    cases: Cases = {}
    for bits in (1, 2):
        plain = full_range(PRESETS[f"calibquant-{bits}bit"])
        cases |= {
            f"{bits} bit, r = 1, no tau": (plain, NONE),
            f"{bits} bit, r = 1, tau2 = 3": (replace(plain, tau2=3.0), NONE),
            f"{bits} bit, r = 1, tau searched": (plain, TAU),
            f"{bits} bit, r = 1, tau per layer": (
                plain,
                KVCalibration(calibrate_clip_ratios=False, tau_per_layer=True, given=["key_rounding"]),
            ),
            f"{bits} bit, ranges searched, no tau": (plain, RANGES),
            f"{bits} bit, ranges and tau searched": (plain, BOTH),
        }
    cases["1 bit, released: r = 0.5 and 0.3, tau2 = 3"] = (PRESETS["calibquant-1bit"], NONE)
    cases["1 bit, released ranges, no tau"] = (replace(PRESETS["calibquant-1bit"], tau2=0.0), NONE)
    return cases


def budget_cases() -> Cases:
    names = ("uniform", "pyramid", "var_prop", "var_inv", "calibrated")
    cases = {}
    for label, scheme in (("2 bit", MINIKV), ("16 bit", replace(MINIKV, key_bits=16, value_bits=16))):
        cases |= {f"{label}, {name}": (replace(scheme, allocation=name), NONE) for name in names}
    return cases


SUITES = {"ranges": range_cases, "kitty": kitty_cases, "tau": tau_cases, "budgets": budget_cases}


def calibrated(scheme: KVScheme, calibration: KVCalibration) -> tuple[list[KVScheme], dict[str, torch.Tensor]]:
    """Resolved schemes and plan of the reference model's layers, values rotated at run time."""
    recipe = Recipe(weights=WeightsRecipe(method="none"), kv=scheme, calibration=calibration)
    with tempfile.TemporaryDirectory() as folder:
        work = calibrate(str(MODEL), folder, recipe=recipe, samples=16, seq_len=512, progress=False)
        layers = range(work.state.num_layers)
        schemes = [KVScheme.from_dict(work.layer_record(i).scheme).with_online_rotation() for i in layers]
        return schemes, {name: tensor for i in layers for name, tensor in work.layer_plan(i).items()}


def measure(cases: Cases, model: torch.nn.Module, source: Decoder, ids: torch.Tensor) -> dict[str, dict]:
    decoders, chosen = {}, {}
    for name, (scheme, calibration) in cases.items():
        schemes, plan = calibrated(scheme, calibration)
        chosen[name] = {
            field: [getattr(s, field) for s in schemes]
            for field in ("key_clip_ratio", "value_clip_ratio", "tau1", "tau2", "heavy_ratio")
            if any(getattr(s, field) != getattr(KVScheme(), field) for s in schemes)
        }
        decoders[name] = Decoder(model, lambda s=schemes, p=plan: KVCache(model.config, s, plan=p))
    first = next(iter(cases.values()))[0]
    prefill = 512 if first.is_span or first.evicts else 128
    results = {}
    for name, comparison in compare(source, decoders, ids, prefill=prefill).items():
        kl = comparison.kl
        results[name] = {
            "kl": float(kl.mean()),
            "kl_p99": float(kl.flatten().quantile(0.99)),
            "top1": float(comparison.agrees.double().mean()),
            **chosen[name],
        }
        print(f"{results[name]['kl']:8.4f} {results[name]['kl_p99']:7.3f} {results[name]['top1']:6.3f}  {name}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", default=[*SUITES], metavar="SUITE")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source = Decoder.plain(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval())
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model.set_attn_implementation("kvconvert")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = load_token_samples(None, tokenizer, 8, 1024, 0, default="evaluation").ids
    results = {}
    for suite in arguments.suites:
        print(f"{suite}: KL, its 99th percentile, top-1 agreement", flush=True)
        results[suite] = measure(SUITES[suite](), model, source, ids)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
