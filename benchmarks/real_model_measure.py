"""How `benchmarks/real_model.py` measures one case: text, numbers and values retrieved, and the size of the cache."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from kvconvert.fidelity.retrieval import (
    RETRIEVAL_ANSWER_TOKENS,
    Drill,
    DrillBook,
    NumberBook,
    answer_with,
    has_plain_template,
    retrieval_right,
)
from kvconvert.fidelity.scoring import (
    Decoder,
    compare,
    feed,
    first_page,
    read_prompt,
    schemes_of,
    treats_whole_prompts,
)
from kvconvert.kernels.launches import Launch, record_specializations
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import SEARCHED_FIELDS, KVScheme
from kvconvert.models.configuration import head_dim, key_value_heads
from kvconvert.runtime import KVCache

MEASURED_CHUNK = 1024  # tokens per pass while the size of a cache is measured
FIRST_SCORED = PAGE_SIZE + 32  # token of a segment from which on all are scored, beyond every preset's sink tokens
STEP = 16  # tokens between measurements over the last page of lengths
# Tokens of passes that launch what all others do: whole pages, a text's end, a prompt's, a question, generated tokens.
PASSES = (PAGE_SIZE, PAGE_SIZE, PAGE_SIZE, 3, 45, 33, 1, 1)


@torch.no_grad()
def launches_of(decoder: Decoder, rows: Sequence[int]) -> list[Launch]:
    """The kernels a GPU would launch to read rows page by page and query them, recorded and not launched.

    Layers of `auto` may have a dozen formats with kernels of their own, which take minutes to compile one by one.
    """
    with record_specializations() as launches:
        for count in rows:
            cache = decoder.new_cache()
            for tokens in (first_page(schemes_of(cache)), *PASSES):
                feed(decoder, cache, torch.zeros(count, tokens, dtype=torch.int64), logits_to_keep=1)
    return list(launches)


def text_figures(source: Decoder, decoder: Decoder, texts: Mapping[str, torch.Tensor], batch: int) -> dict[str, Any]:
    """KL and likelihood of each text [segments, length], read page by page, per segment."""
    names, rows = list(texts), torch.cat(list(texts.values()))
    prefill = first_page(schemes_of(decoder.new_cache()))
    found = compare(source, {"case": decoder}, rows, prefill, batch=batch, progress=True)["case"]
    counts, skipped = [len(texts[name]) for name in names], max(0, FIRST_SCORED - prefill)
    parts = {
        field: dict(zip(names, getattr(found, field)[:, skipped:].split(counts), strict=True))
        for field in ("kl", "source_nll", "other_nll", "agrees")
    }
    return {
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


class Retrieval:
    """The same prompts for every case: a number hidden in prose, or the value of a key in a JSON object, asked for
    after all of it was read page by page.

    Args:
        tokenizer: with a chat template, or without, where prompts are plain text.
        config: the configuration of the model; lengths that its positions do not hold are left out.
        prose: token ids of the filler.
        lengths: tokens of prose; pairs: of JSON objects; prompts: how many of each.
        seed: the seed of the prompts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        prose: list[int],
        lengths: Sequence[int],
        pairs: Sequence[int],
        prompts: int,
        seed: int,
    ):
        self.tokenizer = tokenizer
        templated = has_plain_template(tokenizer)
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        positions = math.inf if most is None else most
        found: dict[int, list[Drill]] = {}
        for length in lengths:
            if templated:
                book = NumberBook(tokenizer, prose, seed)
                if length + book.room <= positions:
                    found[length] = book.drills(length, prompts)
            else:
                plain = DrillBook(tokenizer, prose, seed)
                made = [plain.code(length, (i % 5) / 5 + 0.1) for i in range(prompts)]
                room = max(len(drill.cue) for drill in made) + RETRIEVAL_ANSWER_TOKENS
                if length + room <= positions:
                    found[length] = made
        objects = ObjectBook(tokenizer, seed)
        looked_up = {count: objects.drills(count, prompts, positions) for count in pairs}
        self.drills = {"found": found, "json": {count: drills for count, drills in looked_up.items() if drills}}

    def of(self, decoder: Decoder, name: str, batch: int) -> dict[str, dict[str, list[bool]]]:
        """Which prompts a decoder answers: `found` by length in tokens, `json` by pairs."""
        answer = answer_with(decoder, self.tokenizer, True, name, PAGE_SIZE, batch)
        return {
            kind: {
                str(size): [
                    retrieval_right(drill, text)
                    for drill, text in zip(drills, answer(drills, RETRIEVAL_ANSWER_TOKENS), strict=True)
                ]
                for size, drills in sizes.items()
            }
            for kind, sizes in self.drills.items()
            if sizes
        }


@torch.no_grad()
def cache_size(
    config: PretrainedConfig,
    schemes: Sequence[KVScheme | None],
    plan: Mapping[str, torch.Tensor],
    tokens: int,
    device: str,
) -> dict[str, Any]:
    """Bytes and bits of a cache of `tokens` tokens in bfloat16, measured from its tensors.

    The number of bytes depends on how many tokens were read and not on what they are: a model of random weights with
    the same keys and values, and little else, fills the cache; one layer stands for all with the same scheme. Evicted
    tokens take no bytes and are counted among those that bytes are divided by; those that have left the window of a
    layer with sliding attention are not, for the source drops them, too. How full the last page is differs from length
    to length, and with the number of sink tokens: `mean_bits_per_value` is the mean over the last 128 lengths, but for
    caches that compress prompts as a whole.
    """
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(schemes)
    chosen = _representatives(schemes, types)
    plan = {
        name.replace(f"layers.{old}.", f"layers.{new}.", 1): tensor
        for new, old in enumerate(chosen)
        for name, tensor in plan.items()
        if name.startswith(f"layers.{old}.")
    }
    small = copy.deepcopy(config)
    heads, channels = key_value_heads(config), head_dim(config)
    small.update({"hidden_size": heads * channels, "intermediate_size": 16, "vocab_size": 64})
    small.update({"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": channels})
    small.num_hidden_layers = len(chosen)
    if getattr(config, "layer_types", None) is not None:
        small.layer_types = [types[layer] for layer in chosen]
    small.bos_token_id = small.eos_token_id = small.pad_token_id = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16, attn_implementation="kvconvert")
    model = model.to(device).eval()
    own = [schemes[layer] for layer in chosen]
    cache = KVCache(small, [s if s is None else s.with_online_rotation() for s in own], plan=plan)
    ids = torch.randint(64, (1, tokens), generator=torch.Generator().manual_seed(0))
    layers = [layer for layer, count in enumerate(chosen.values()) for _ in range(count)]
    windows = [config.sliding_window if types[layer] == "sliding_attention" else tokens for layer in chosen]

    def filled() -> torch.Tensor:
        """Bits, and numbers that they stand for, of the layers, each as often as it stands for one."""
        stores = [layer.store for layer in cache.paged_layers()]
        held = [min(window, cache.get_seq_length()) for window in windows]
        numbers = sum(held[layer] for layer in layers) * 2 * heads * channels
        return torch.tensor([8.0 * sum(stores[layer].bytes_used() for layer in layers), numbers], dtype=torch.float64)

    def ratio(bits: torch.Tensor, numbers: torch.Tensor) -> float:
        return float(bits / numbers)

    decoder, over_page = Decoder(model, lambda: cache), torch.zeros(2, dtype=torch.float64)
    last = 0 if treats_whole_prompts(cache) else PAGE_SIZE
    with record_specializations():  # a GPU's kernels need neither run nor be compiled: no number counts
        read_prompt(decoder, cache, ids[:, : tokens - last], MEASURED_CHUNK)
        # In the middle of every STEP lengths as pages count them, so that the mean is that of all lengths.
        middles = {n for n in range(tokens - last + 1, tokens + 1) if n % STEP == STEP // 2}
        for start, stop in pairwise(sorted({tokens - last, *middles, tokens})):
            feed(decoder, cache, ids[:, start:stop], logits_to_keep=1)
            if stop in middles:
                over_page += filled()
    stores = [layer.store for layer in cache.paged_layers()]
    kept, exact = (
        sum(counts[layer] for layer in layers) / len(layers)
        for counts in ([s.tokens() for s in stores], [s.residual_tokens() for s in stores])
    )
    return {
        "tokens": tokens,
        "bits_per_value": ratio(*filled()),
        "mean_bits_per_value": ratio(*over_page) if last else ratio(*filled()),
        "bytes_per_token": sum(stores[layer].bytes_used() for layer in layers) / tokens,
        "kept_tokens": kept,
        "full_precision_tokens": exact,
    }


def _representatives(schemes: Sequence[KVScheme | None], types: Sequence[str]) -> dict[int, int]:
    """Layers whose caches are filled, each with the number of layers of its size; all where budgets differ."""
    if any(scheme is not None and scheme.evicts and scheme.allocation != "uniform" for scheme in schemes):
        return dict.fromkeys(range(len(schemes)), 1)
    # What calibration searches decides on codes and not on their number.
    sizes = [
        (kind, s and tuple(v for k, v in s.to_dict().items() if k not in SEARCHED_FIELDS))
        for kind, s in zip(types, schemes, strict=True)
    ]
    return {sizes.index(size): count for size, count in Counter(sizes).items()}


QUESTION = 'What is the value of "item_{key}"?'
ANSWER = 'The value of "item_{key}" is "'
_OBJECT = "<<<object>>>"


class ObjectBook:
    """Writes prompts that hold a JSON object of near-identical keys and ask for the value of one.

    Keys differ in three digits and values have five, so that prompts of as many pairs are equally long for every
    tokenizer that has one token per digit. A model with a chat template is asked in it, and its answer is begun up to
    the value; any other continues a text.

    Args:
        tokenizer: the model's tokenizer.
        seed: the seed of keys and values.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int):
        self.tokenizer, self.random = tokenizer, random.Random(seed)
        self.head, self.tail = "", "\n"
        if has_plain_template(tokenizer):
            content = f"Read this JSON object.\n\n{_OBJECT}\n\n{QUESTION}"
            message = [{"role": "user", "content": content}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            self.head, _, self.tail = text.partition(_OBJECT)
        elif tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
            self.head = tokenizer.bos_token

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens of the tokenizer's own."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def drill(self, pairs: int, depth: float) -> Drill:
        """An object of `pairs` pairs; the key at a share `depth` of them is asked for."""
        keys = [f"{key:03d}" for key in self.random.sample(range(1000), pairs)]
        values = {key: str(self.random.randrange(10_000, 100_000)) for key in keys}
        asked = keys[round(depth * (pairs - 1))]
        shown = json.dumps({f"item_{key}": value for key, value in values.items()})
        cue = (self.tail + ANSWER).replace("{key}", asked)
        return Drill(self.encode(self.head + shown), self.encode(cue), values[asked], depth)

    def drills(self, pairs: int, count: int, positions: int) -> list[Drill]:
        """`count` of them, evenly spaced over the object; none where the model has too few positions."""
        made = [self.drill(pairs, (i + 0.5) / count) for i in range(count)]
        longest = max(len(drill.context) + len(drill.cue) for drill in made) + RETRIEVAL_ANSWER_TOKENS
        return made if longest <= positions else []
