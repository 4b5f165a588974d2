"""How `benchmarks/real_model.py` measures one case: text, numbers recalled, and the size of the cache."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from kvconvert.fidelity.numbers import NumberBook, has_plain_template
from kvconvert.fidelity.recall import PASSKEY_ANSWER_TOKENS, Drill, DrillBook, answer_with, passkey_right
from kvconvert.fidelity.scoring import Decoder, before_chunks, compare, feed, read_prompt, treats_whole_prompts
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import SEARCHED_FIELDS, KVScheme
from kvconvert.runtime import KVCache

MEASURED_CHUNK = 1024  # tokens per pass while the size of a cache is measured
FIRST_SCORED = PAGE_SIZE + 32  # token of a segment from which on all are scored, beyond every preset's sink tokens
STEP = 16  # tokens between measurements over the last page of lengths


def text_figures(
    source: Decoder, decoder: Decoder, texts: Mapping[str, torch.Tensor], prompt: int | None, batch: int
) -> dict[str, Any]:
    """KL and likelihood of each text [segments, length], per segment.

    Page by page, or after the first `prompt` tokens of each segment, read and sealed as a whole. Pages begin after the
    sink tokens, and so do chunks; tokens are scored from the same one on whatever their number is.
    """
    names, rows = list(texts), torch.cat(list(texts.values()))
    first = before_chunks(decoder.new_cache())
    prefill = first if prompt is None else prompt
    found = compare(source, {"case": decoder}, rows, prefill, batch=batch, progress=True)["case"]
    counts, skipped = [len(texts[name]) for name in names], max(0, FIRST_SCORED - prefill) if prompt is None else 0
    parts = {
        field: dict(zip(names, getattr(found, field)[:, skipped:].split(counts), strict=True))
        for field in ("kl", "source_nll", "other_nll", "agrees")
    }
    return {
        "protocol": "pages" if prompt is None else "sealed prompt",
        "scored_per_segment": found.kl.shape[1] - skipped,
        "full_precision_share": found.residual_share,
        "texts": {name: _text_row({field: parts[field][name] for field in parts}) for name in names},
        "clamped_rows": found.clamped_rows,
    }


def _text_row(parts: dict[str, torch.Tensor]) -> dict[str, Any]:
    kl = parts["kl"]
    return {
        "kl": float(kl.mean()),
        "kl_p99": float(kl.flatten().sort().values[int(0.99 * (kl.numel() - 1))]),
        "perplexity": float(parts["other_nll"].mean().exp()),
        "source_perplexity": float(parts["source_nll"].mean().exp()),
        "top1_agreement": float(parts["agrees"].double().mean()),
        "kl_by_segment": kl.mean(1).tolist(),
        "nll_by_segment": parts["other_nll"].mean(1).tolist(),
    }


class Recall:
    """The same prompts for every case: a number hidden in prose, asked for after all of it was read page by page.

    Args:
        tokenizer: with a chat template, or without, where today's plain passkeys are asked.
        config: of the model; lengths that its positions do not hold are left out.
        prose: token ids of the filler.
        lengths: tokens of prose; prompts: how many of each.
        seed: of the prompts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        prose: list[int],
        lengths: Sequence[int],
        prompts: int,
        seed: int,
    ):
        self.tokenizer = tokenizer
        self.templated = has_plain_template(tokenizer)
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or max(lengths)
        self.drills: dict[int, list[Drill]] = {}
        for length in lengths:
            if self.templated:
                book = NumberBook(tokenizer, prose, seed)
                if length + book.room <= positions:
                    self.drills[length] = book.drills(length, prompts)
            else:
                plain = DrillBook(tokenizer, prose, seed)
                made = [plain.passkey(length, (i % 5) / 5 + 0.1) for i in range(prompts)]
                room = max(len(drill.cue) for drill in made) + PASSKEY_ANSWER_TOKENS
                if length + room <= positions:
                    self.drills[length] = made

    def of(self, decoder: Decoder, name: str, batch: int) -> dict[str, list[bool]]:
        """Which prompts of each length a decoder answers."""
        answer = answer_with(decoder, self.tokenizer, True, name, PAGE_SIZE, batch)
        return {
            str(length): [
                passkey_right(drill, text)
                for drill, text in zip(drills, answer(drills, PASSKEY_ANSWER_TOKENS), strict=True)
            ]
            for length, drills in self.drills.items()
        }


@torch.no_grad()
def cache_size(
    config: PretrainedConfig,
    schemes: Sequence[KVScheme | None],
    plan: Mapping[str, torch.Tensor],
    tokens: int,
    device: str,
) -> dict[str, Any]:
    """What a cache of `tokens` tokens stores in bfloat16, measured from its tensors.

    The number of bytes depends on how many tokens were read and not on what they are: a model of random weights with
    the same keys and values, and little else, fills the cache; one layer stands for all with the same scheme. Evicted
    tokens take no bytes and are counted among those that bytes are divided by. How full the last page is differs from
    length to length, and with the number of sink tokens: `mean_bits_per_value` is the mean over the last 128 lengths,
    but for caches that compress prompts as a whole.
    """
    chosen = _representatives(schemes)
    plan = {
        name.replace(f"layers.{old}.", f"layers.{new}.", 1): tensor
        for new, old in enumerate(chosen)
        for name, tensor in plan.items()
        if name.startswith(f"layers.{old}.")
    }
    small = copy.deepcopy(config)
    heads = small.num_key_value_heads
    small.update({"hidden_size": 16, "intermediate_size": 16, "vocab_size": 64, "num_attention_heads": heads})
    small.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    small.num_hidden_layers = len(chosen)
    if getattr(config, "layer_types", None) is not None:
        small.layer_types = [config.layer_types[layer] for layer in chosen]
    small.bos_token_id = small.eos_token_id = small.pad_token_id = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16, attn_implementation="kvconvert")
    model = model.to(device).eval()
    own = [schemes[layer] for layer in chosen]
    cache = KVCache(small, [s if s is None else s.with_online_rotation() for s in own], plan=plan)
    ids = torch.randint(64, (1, tokens), generator=torch.Generator().manual_seed(0))
    numbers = 2 * heads * small.head_dim  # of a token in one layer
    layers = [layer for layer, count in enumerate(chosen.values()) for _ in range(count)]
    decoder, bits = Decoder(model, lambda: cache), []
    last = 0 if treats_whole_prompts(cache) else PAGE_SIZE
    read_prompt(decoder, cache, ids[:, : tokens - last], MEASURED_CHUNK)
    for start in range(tokens - last, tokens, STEP):
        feed(decoder, cache, ids[:, start : start + STEP], logits_to_keep=1)
        bits.append(8 * _bytes(cache, layers) / (cache.get_seq_length() * numbers * len(layers)))
    total = _bytes(cache, layers)
    at_end = 8 * total / (tokens * numbers * len(layers))
    stored = [(layer.store.tokens(), layer.store.residual_tokens()) for layer in cache.paged_layers()]
    kept, exact = (sum(stored[layer][i] for layer in layers) / len(layers) for i in (0, 1))
    return {
        "tokens": tokens,
        "bits_per_value": at_end,
        "mean_bits_per_value": sum(bits) / len(bits) if bits else at_end,
        "bytes_per_token": total / tokens,
        "kept_tokens": kept,
        "full_precision_tokens": exact,
    }


def _representatives(schemes: Sequence[KVScheme | None]) -> dict[int, int]:
    """Layers whose caches are filled, each with the number of layers of its size; all where budgets differ."""
    if any(scheme is not None and scheme.evicts and scheme.allocation != "uniform" for scheme in schemes):
        return dict.fromkeys(range(len(schemes)), 1)
    # What calibration searches decides on codes and not on their number.
    sizes = [s and tuple(v for k, v in s.to_dict().items() if k not in SEARCHED_FIELDS) for s in schemes]
    return {sizes.index(size): count for size, count in Counter(sizes).items()}


def _bytes(cache: KVCache, layers: Sequence[int]) -> int:
    """Bytes in use of layers that may be named several times."""
    used = [layer.store.bytes_used() for layer in cache.paged_layers()]
    return sum(used[layer] for layer in layers)


def is_sealed(decoder: Decoder) -> bool:
    """Whether the cache compresses prompts as a whole."""
    return treats_whole_prompts(decoder.new_cache())
