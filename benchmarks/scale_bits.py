"""What scales of 8 bits buy at equal bytes, and which tokens a cache's KL comes from, by simulation.

Run: python benchmarks/scale_bits.py MODEL --text DIR [--length 1028 --bits 1.79,2.62 --context 4100]

DIR holds books-calib.txt, on which treatments, error feedback and clip ratios are fitted (two samples of 512 tokens),
wikitext2-test.txt, books-val.txt and tinystories-val.txt. For each budget the smallest sum of the layers' relative
output errors is allocated exactly, over candidates with scales of 16 bits alone and over those with both. Evenly spaced
segments (three of WikiText-2, two of each other text) are scored from token 128 on. Of the last plan it prints the KL
of tokens beside markup, of tokens whose bigram was seen before in the segment, by the source's entropy, and by layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from runner import option_parser
from simulated_treatments import SAMPLE, SCORED_FROM, Simulation
from torch import Tensor

from kvconvert.auto.allocation import allocate
from kvconvert.auto.layers import SearchedLayer
from kvconvert.auto.model import ExactText, SimulatedModel
from kvconvert.cache.format import CacheFormat
from kvconvert.cache.size import lengths
from kvconvert.calibration.clip_ratios import key_clip_ratio_errors, value_clip_ratio_errors
from kvconvert.calibration.key_treatments import TreatmentSearch
from kvconvert.calibration.simulated_attention import simulated_caches
from kvconvert.methods import KVScheme
from kvconvert.methods.auto import Candidate
from kvconvert.methods.key_treatments import treatments

SAMPLES, WINDOW = 2, 128
RATIOS = {1: (0.6, 0.5, 0.4), 2: (0.9, 0.8, 0.7), 3: (1.0, 0.9, 0.8), 4: (1.0, 0.9)}
EXACT_KEYS = {"token_norm": "none", "rotate_keys": "none", "key_rounding": "nearest", "key_center": "none"}


def candidates(side: str, scale_bits: tuple[int, ...]) -> tuple[Candidate, ...]:
    """Groups of 128 at 1, 2 and 3 bits with each width of scales, at 4 bits with scales of 16, and full precision."""
    found = []
    for bits, scales in [*((b, s) for s in scale_bits for b in (1, 2, 3)), (4, 16), (16, 16)]:
        fields = {"bits": bits, "group_size": 128, "recent_tokens": 0, "scale_bits": scales}
        fields = {f"{side}_{name}": value for name, value in fields.items()}
        if side == "key":
            fields |= {"boost_fraction": 0.0} | (EXACT_KEYS if bits == 16 else {})
        found.append(Candidate(f"{side[0].upper()}{bits}{'s8' * (scales == 8)}", side, fields))
    return tuple(found)


def fitted(layer: SearchedLayer, fit: TreatmentSearch) -> tuple[SearchedLayer, dict[str, float], dict[str, float]]:
    """The layer with treated keys, and each candidate's clip ratio and relative output error."""
    fields: dict[int, dict[str, object]] = {}
    for candidate in layer.keys[:-1]:
        scheme = layer.scheme_of(candidate)
        if scheme.key_bits not in fields:
            choices = [t for t in treatments(scheme, layer.head_dim) if "key_bits" not in t.fields]
            fields[scheme.key_bits] = dict(fit.best(scheme, choices)[0].fields)
    layer = layer.treated({c.name: fields[c.fields["key_bits"]] for c in layer.keys[:-1]})
    ratios, losses = {}, {}
    for candidate in layer.candidates:
        losses[candidate.name] = 0.0
        if candidate.exact:
            continue
        cache, grid = layer.cache(candidate, measured=fit), RATIOS[candidate.fields[f"{candidate.side}_bits"]]
        errors_of = key_clip_ratio_errors if candidate.side == "key" else value_clip_ratio_errors
        errors = errors_of(fit.sample(cache.rotations.keys), cache, grid)
        ratios[candidate.name], losses[candidate.name] = grid[int(errors.argmin())], float(errors.min())
    return layer, ratios, losses


def without_markup(text: str) -> str:
    """WikiText-2 without its marks and the spaces around punctuation."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?%)\u2019])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    text = re.sub(r' " ([^"\n]*?) " ', r' "\1" ', text).replace(" n't", "n't").replace(" 's", "'s")
    return re.sub(r"(?m)^ (= )+(.*?)( =)+ *$", r"\2", text)


def token_kl(simulated: SimulatedModel, text: ExactText, caches: Mapping[int, CacheFormat]) -> Tensor:
    """KL after each scored token, [rows, scored]."""
    found = []
    for row, exact in zip(text.ids, text.log_probs, strict=True):
        with simulated_caches(caches):
            logits = simulated.model(input_ids=row[None], use_cache=False).logits[0, text.positions]
        found.append((exact.exp() * (exact - logits.log_softmax(-1))).sum(-1))
    return torch.stack(found)


def describe(name: str, text: ExactText, kl: Tensor, decode: object) -> None:
    """Print what kinds of tokens a KL comes from."""
    entropy = -(text.log_probs.exp() * text.log_probs).sum(-1)
    marked, seen = torch.zeros_like(kl, dtype=torch.bool), torch.zeros_like(kl, dtype=torch.bool)
    for number, row in enumerate(text.ids.tolist()):
        bigrams = set()
        for place in range(1, len(row)):
            if place >= SCORED_FROM:
                near = decode(row[place - 1 : place + 2])
                marked[number, place - SCORED_FROM] = any(mark in near for mark in ("@", "=", " , "))
                seen[number, place - SCORED_FROM] = tuple(row[place : place + 2]) in bigrams
            bigrams.add((row[place - 1], row[place]))
    kinds = {
        "beside markup": marked,
        "bigram seen before": seen & ~marked,
        "others": ~seen & ~marked,
        "entropy below 1": entropy < 1,
        "1 to 3": (entropy >= 1) & (entropy < 3),
        "above 3": entropy >= 3,
    }
    most = kl.flatten().sort(descending=True).values
    print(f"{name}: KL {kl.mean():.4f}, median {kl.median():.4f}, 1% of tokens have", end=" ")
    print(f"{most[: len(most) // 100].sum() / most.sum():.0%}, entropy {entropy.mean():.2f}", flush=True)
    for kind, where in kinds.items():
        if where.any():
            share = kl[where].sum() / kl.sum()
            print(f"  {kind}: {where.float().mean():.0%} of tokens, KL {kl[where].mean():.4f}, {share:.0%} of it")


@torch.no_grad()
def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1028)
    parser.add_argument("--context", type=int, default=4100)
    parser.add_argument("--bits", default="1.79,2.62")
    args = parser.parse_args()
    simulated = Simulation(args.model)

    def read(text: str, count: int, length: int = args.length, first: int = SCORED_FROM) -> ExactText:
        ids = simulated.tokenizer(text[:400_000])["input_ids"]
        stride = len(ids) // count
        return simulated.read(torch.tensor([ids[i * stride : i * stride + length] for i in range(count)]), first)

    names = ("books-calib", "wikitext2-test", "books-val", "tinystories-val")
    calib, wiki, novels, stories = ((args.text / f"{name}.txt").read_text() for name in names)
    fitted_on = read(calib, SAMPLES, SAMPLE, SAMPLE)
    scheme = replace(KVScheme.preset("default").with_online_rotation(), **EXACT_KEYS)
    layers, fits, ratios, losses = [], [], [], []
    sides = (candidates(side, (16, 8)) for side in ("key", "value"))
    for plain, fit in simulated.measured_layers(fitted_on, scheme, "default", *sides, args.context):
        for found, one in zip((layers, ratios, losses), fitted(plain, fit), strict=True):
            found.append(one)
        fits.append(fit)
    texts = {"WikiText-2": read(wiki, 3), "novels": read(novels, 2)}
    plain_bytes = sum(layer.cache_of(None).plain_bytes(n) for layer in layers for n in lengths(args.context))
    caches: dict[int, CacheFormat] = {}
    for bits in map(float, args.bits.split(",")):
        for what, widths in (("16 bits", (16,)), ("16 or 8 bits", (16, 8))):
            known = {c.name for side in ("key", "value") for c in candidates(side, widths)}
            some = [
                replace(own, keys=tuple(c for c in own.keys if c.name in known),
                        values=tuple(c for c in own.values if c.name in known))
                for own in layers
            ]  # fmt: skip
            options = [own.options(loss) for own, loss in zip(some, losses, strict=True)]
            chosen = allocate(options, int(plain_bytes / 16 * bits))
            plan = [own.pairs()[i] for own, i in zip(some, chosen.options, strict=True)]
            caches = {
                own.index: own.cache(*pair, clip_ratios=ratio, measured=fit)
                for own, pair, ratio, fit in zip(some, plan, ratios, fits, strict=True)
            }
            count = Counter(c.name for pair in plan for c in pair)
            kl = {name: round(simulated.divergence(text, caches), 4) for name, text in texts.items()}
            print(f"{16 * chosen.cost / plain_bytes:.3f} bits, scales of {what}: {kl} {dict(count)}", flush=True)
    more = {"WikiText-2 without markup": read(without_markup(wiki), 3), "stories": read(stories, 2)}
    for name, text in (texts | more).items():
        describe(name, text, token_kl(simulated, text, caches), simulated.tokenizer.decode)
    variants = {"32 sink tokens": {i: replace(c, sink_tokens=32) for i, c in caches.items()}}
    recent = {
        side: replace(getattr(next(iter(caches.values())), side), recent_tokens=WINDOW) for side in ("keys", "values")
    }
    variants[f"{WINDOW} recent tokens"] = {i: replace(c, **recent) for i, c in caches.items()}
    third = -(-len(layers) // 3)
    for start in range(0, len(layers), third):
        part = range(start, start + third)
        variants[f"layers {start} to {part[-1]} alone"] = {i: c for i, c in caches.items() if i in part}
    for name, changed in variants.items():
        print(name, {key: round(simulated.divergence(text, changed), 4) for key, text in texts.items()}, flush=True)


if __name__ == "__main__":
    main()
