"""What a latent (MLA) cache loses at 4, 3 and 2 bits: latents quantized per token or per channel, rotated or plain.

    python benchmarks/latent.py MODEL TEXT.txt [--json benchmarks/results/latent.json]

MODEL stores a latent vector and a RoPE part per token and layer (DeepSeek V2, V3 and what follows them); for instance
the small one that examples/reference-lm/train_latent_lm.py trains in half an hour.
Every case is simulated: pages of 128
tokens are quantized and dequantized in transformers' own cache once they are complete and have been attended to, all
but the first 4 tokens of a sequence. Text is read as a prompt of three pages and then in pieces of 32 tokens, whose
KL to the model with its own cache is averaged. Paired by segment; 95% bootstrap intervals.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from runner import option_parser, save
from tables import difference, signed, table
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.rotate import hadamard_transform

PAGE, SINKS, PROMPT, PIECE = 128, 4, 384, 32
WIDTHS = (4, 3, 2)
ROPE_GROUP = 64  # channels of a RoPE part that share a scale


@dataclass(frozen=True)
class Case:
    """How pages of latents are stored; 16 bits are exact.

    Attributes:
        bits: of a latent's code.
        axis: what shares a scale with a group of its own: consecutive channels of a "token", or tokens of a "channel".
        rotated: whether latents are rotated by a Hadamard matrix before.
        group: entries that share a scale.
        clip: factor by which a group's range shrinks.
        rope_bits: of the RoPE part, per token.
    """

    bits: int
    axis: str = "token"
    rotated: bool = False
    group: int = 32
    clip: float = 1.0
    rope_bits: int = 8


def cases() -> list[Case]:
    """Every axis, rotation and group at each width; then clipped ranges."""
    found = [Case(16)]
    for bits in WIDTHS:
        for axis in ("token", "channel"):
            for rotated in (False, True):
                found += [Case(bits, axis, rotated, group) for group in (32, 128)]
                found += [Case(bits, axis, rotated, 128, clip) for clip in (0.92, 0.85)]
    return found


class SimulatedLayer(DynamicLayer):
    """transformers' layer, whose complete pages are quantized before the next tokens come."""

    def __init__(self, case: Case):
        super().__init__()
        self.case, self.done = case, 0

    def update(self, latent: Tensor, rope: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new latents [B, 1, T, R] and RoPE parts [B, 1, T, r]; everything stored comes back."""
        if self.is_initialized:
            complete = self.keys.shape[2] // PAGE * PAGE
            for start in range(self.done, complete, PAGE):
                exact = SINKS if start == 0 else 0
                for tokens, roundtrip in ((self.keys, self._latents), (self.values, self._rope)):
                    page = tokens[:, :, start : start + PAGE].to(torch.float32, copy=True)
                    page[:, :, :exact] = page[:, :, exact : exact + 1]  # tokens stored elsewhere widen no range
                    tokens[:, :, start + exact : start + PAGE] = roundtrip(page)[:, :, exact:].to(tokens.dtype)
            self.done = complete
        return super().update(latent, rope, *args, **kwargs)

    def _latents(self, page: Tensor) -> Tensor:
        case = self.case
        if case.bits == 16:
            return page
        if case.rotated:
            page = hadamard_transform(page)
        page = _roundtrip(page, case.bits, case.group, 3 if case.axis == "token" else 2, case.clip)
        return hadamard_transform(page, inverse=True) if case.rotated else page

    def _rope(self, page: Tensor) -> Tensor:
        group = min(page.shape[3], ROPE_GROUP)
        return page if self.case.rope_bits == 16 else _roundtrip(page, self.case.rope_bits, group, 3)


def _roundtrip(x: Tensor, bits: int, group: int, dim: int, clip: float = 1.0) -> Tensor:
    return dequantize(*quantize(x, bits, group, dim, clip), group, dim)


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, ids: Tensor, case: Case | None) -> Tensor:
    """Of the tokens after the prompt of ids [B, T], read through a cache: [B, T - PROMPT, vocabulary]."""
    count = model.config.num_hidden_layers
    layers = [DynamicLayer() if case is None else SimulatedLayer(case) for _ in range(count)]
    cache = Cache(layers=layers)
    model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
    pieces = [model(piece, past_key_values=cache).logits.log_softmax(-1) for piece in ids[:, PROMPT:].split(PIECE, 1)]
    return torch.cat(pieces, 1)


def measure(model: PreTrainedModel, ids: Tensor, every: list[Case]) -> dict[str, Any]:
    """KL of each segment, by case, and what the model itself scores."""
    source = log_probabilities(model, ids, None)
    loss = -source[:, :-1].gather(2, ids[:, PROMPT + 1 :, None]).mean()
    found = []
    for case in every:
        ours = log_probabilities(model, ids, case)
        kl = kl_div(ours, source, log_target=True, reduction="none").sum(-1).mean(1)
        same = (ours.argmax(-1) == source.argmax(-1)).float().mean()
        found.append(asdict(case) | {"kl": kl.tolist(), "same_token": same.item()})
        print(f"{case}: {kl.mean():.5f}", flush=True)
    return {"perplexity": loss.exp().item(), "cases": found}


def report(found: dict[str, Any]) -> str:
    """KL of each way of storing latents by width, and 2 bits against plain groups of 128 channels of a token."""
    fields = Case.__dataclass_fields__
    kl = {Case(**{name: entry[name] for name in fields}): entry["kl"] for entry in found["cases"]}
    rows = []
    for case in (case for case in kl if case.bits == 4):
        means = [sum(kl[replace(case, bits=bits)]) / len(kl[case]) for bits in WIDTHS]
        two, plain = (kl[replace(entry, bits=2)] for entry in (case, Case(4, "token", False, PAGE)))
        less = "" if two is plain else signed(difference(two, plain))
        kind = f"per {case.axis}, {'rotated' if case.rotated else 'plain'}"
        rows.append((kind, case.group, case.clip, *(f"{mean:.5f}" for mean in means), less))
    head = ("scales", "group", "clip ratio", *(f"{bits} bits" for bits in WIDTHS), "2 bits, less per token, plain, 128")
    return table(head, rows)


def add_segment_options(parser: ArgumentParser, segments: int, length: int) -> None:
    """MODEL, TEXT, and how many segments of it are read."""
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--segments", type=int, default=segments)
    parser.add_argument("--length", type=int, default=length, help="tokens of a segment")
    parser.add_argument("--seed", type=int, default=0, help="of where the segments begin")
    parser.add_argument("--json", type=Path, help="where results go")


def read_segments(args: Namespace) -> tuple[PreTrainedModel, torch.Tensor]:
    """The model in float32, and segments [n, length] of its text at random places."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokens = torch.tensor(AutoTokenizer.from_pretrained(args.model)(args.text.read_text(encoding="utf-8"))["input_ids"])
    generator = torch.Generator().manual_seed(args.seed)
    starts = torch.randint(len(tokens) - args.length, (args.segments,), generator=generator).tolist()
    return model, torch.stack([tokens[start : start + args.length] for start in starts])


def keep(args: Namespace, found: dict[str, Any]) -> None:
    """Save what was found in these segments, and print what the model itself scores."""
    found |= {"model": args.model.name, "text": args.text.name, "seed": args.seed, "length": args.length}
    save(args.json, found)
    print(f"\nperplexity {found['perplexity']:.2f}, {args.segments} segments of {args.length} tokens, seed {args.seed}")


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    add_segment_options(parser, segments=24, length=640)
    args = parser.parse_args()
    model, ids = read_segments(args)
    found = measure(model, ids, cases())
    keep(args, found)
    print(report(found))


if __name__ == "__main__":
    main()
