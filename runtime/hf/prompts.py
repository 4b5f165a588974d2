"""Prompts of `generate`, read as an Engine reads them: planned for all layers, without padding, and recorded.

A forward pass over several tokens of every row becomes a packed one (`runtime/hf/packed.py`) over the tokens that are
no padding, so that a layer launches the same few kernels for any number of rows. Short ones are replayed as CUDA graphs
(`runtime/hf/captured_passes.py`).

A prompt is read again where what is kept of it follows from that (`seal_prompt`, KVzip).
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvconvert.arguments import checked
from kvconvert.errors import UsageError, counted
from kvconvert.kernels.device import runs_triton, upload
from kvconvert.kernels.launches import skips_launches
from kvconvert.models import CACHE
from kvconvert.models.configuration import context_length
from kvconvert.runtime.cache.forward_pass import PassTokens
from kvconvert.runtime.cache.prompt_pass import MOST_TOKENS, PromptPass, unplanned
from kvconvert.runtime.cache.reconstruct import PART, share_budget
from kvconvert.runtime.hf.cache import KVCache
from kvconvert.runtime.hf.captured import DELAY, is_plain, other_arguments
from kvconvert.runtime.hf.captured_passes import SIZES
from kvconvert.runtime.hf.packed import PackedCache, PaddedBatch

# Logits of so many tokens at most are part of a recorded pass.
RECORDED_LOGITS = 64
# What an output would have one entry per position of.
_EXTRAS = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class Prompt:
    """A forward pass over several tokens of every row that can be packed.

    Attributes:
        cache: the cache of all rows; reader: the cache that is filled, which is the same one or its `reader`.
        ids, positions: int64 [B, T].
        padded: None where all of the ids are tokens.
        kept: which of each row's T positions logits are wanted of; None for all.
    """

    cache: KVCache
    reader: KVCache
    ids: Tensor
    positions: Tensor
    padded: PaddedBatch | None
    kept: list[int] | None


class PackedPrompts:
    """Reads the prompts of one model.

    Args:
        captured: the model's `CapturedSteps`.

    Attributes:
        packed: passes so far.
        prepares: whether `prepare` records anything; False spares the seconds it takes where one prompt is all.
    """

    def __init__(self, captured: Any):
        self._captured = captured
        self.packed = 0
        self.prepares = self._packs = True
        self._prepared: set[int] = set()  # numbers of logits
        # Of each layer keys [H, 0, D] and values [H, 0, E], as the model's layers have made them.
        self._tokens: dict[Hashable, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def layer_by_layer(self) -> Iterator[None]:
        """Within the context no prompt is packed."""
        before, self._packs = self._packs, False
        try:
            yield
        finally:
            self._packs = before

    @torch.no_grad()
    def prepare(self, model: Any, rows: int) -> None:
        """Record passes over prompts of all lengths, for batches of as many rows, if that was not done yet, so that a
        length costs the same whether it has come before or not.

        The model's steps have been recorded, and its kernels are on the GPU.
        """
        device, positions = model.device, max_positions(model)
        passes = self._captured.passes
        counts = [min(size, MOST_TOKENS) // rows for size in SIZES if passes.padded(size, device)]
        counts = [count for count in counts if 2 <= count <= positions]
        room = logits_room(rows)
        if not self.prepares or room in self._prepared or room > RECORDED_LOGITS or not counts:
            return
        self._prepared.add(room)
        # The shortest is launched, then recorded and tested; the longest comes next, whose memory has room for all.
        counts = [*2 * counts[:1], *counts[:0:-1]]
        bar = tqdm(total=len(counts), desc="Preparing prompts", delay=DELAY, leave=False, disable=None)
        with passes.preparing(), bar:
            for count in counts:
                ids = torch.zeros(rows, count, dtype=torch.int64, device=device)
                arguments = {CACHE: model.new_kv_cache(), "input_ids": ids, "logits_to_keep": 1}
                if arguments[CACHE].heads_apart:
                    arguments[CACHE].expect_whole_prompt()
                prompt = self.plan(model, arguments)
                if prompt is None:
                    return
                self.read(prompt)
                bar.update()

    def learn(self, model: Any, arguments: dict[str, Any]) -> None:
        """Remember the shapes of a cache's tokens after a forward pass with these arguments."""
        cache, ids = arguments.get(CACHE), arguments.get("input_ids")
        if not isinstance(cache, KVCache) or not isinstance(ids, Tensor) or not runs_triton(ids.device):
            return
        key, served = _place(model, ids, cache), is_plain(cache) or cache.heads_apart
        if key not in self._tokens and served and all(store.is_allocated for store in cache.stores()):
            self._tokens[key] = [
                tuple(side.expand(len(side) * store.heads_apart, -1, -1) for side in store.empty_tokens)
                for store in cache.stores()
            ]

    def plan(self, model: Any, arguments: dict[str, Any]) -> Prompt | None:
        """A forward pass with these arguments as a packed one; None if it is to go layer by layer.

        Layer by layer go a model's first tokens, by which the shapes of all others are known, what `unplanned` names a
        reason for, more tokens than may lie in full precision in all layers at once, embeddings and images, padding
        between tokens, and what gradients are asked for.

        Raises:
            CacheError: the attention mask differs for stored positions.
        """
        cache, ids = arguments.get(CACHE), arguments.get("input_ids")
        if not isinstance(cache, KVCache) or not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 2:
            return None
        if not self._packs or torch.is_grad_enabled() or not runs_triton(ids.device):
            return None
        owner, cache = cache, _reader(cache)
        if cache is None or not _is_known(model, arguments):
            return None
        rows, length = ids.shape
        start, positions, mask = cache.get_seq_length(), arguments.get("position_ids"), arguments.get("attention_mask")
        if positions is None:
            positions = torch.arange(start, start + length, device=ids.device)
        elif positions.dim() > 2 or positions.shape[-1] != length:
            return None
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (rows, start + length)):
            return None
        kept = _kept(arguments.get("logits_to_keep"), length)
        tokens = self._tokens.get(_place(model, ids, cache))
        if tokens is None or kept is None or not cache.allocate(rows, tokens):
            return None
        rests = any(not sequence.occupied for sequence in cache.groups[0].sequences)
        if rests or unplanned(cache.groups, length) is not None:
            return None
        padded = None
        if mask is not None and not bool((mask != 0).all()):
            padded = _without_padding(cache, mask, start, length)
            if padded is None:
                return None
        elif any(group.real is not None for group in cache.groups):
            return None  # the mask of earlier positions is missing, or has changed
        count = rows * length if padded is None else len(padded.places)
        if not PromptPass(cache.groups, count).has_room(cache.groups, count):
            return None
        wanted = None if len(kept) == length else kept
        return Prompt(owner, cache, ids, positions.expand(rows, length), padded, wanted)

    def read(self, prompt: Prompt) -> CausalLMOutputWithPast:
        """Run a pass of `plan`; logits [B, k, V] of the wanted positions, meaningless at padding.

        Raises:
            CacheError: the pages have a fixed capacity and no room left.
            NumericError: a page holds numbers that cannot be stored.
        """
        self.packed += not skips_launches()
        (rows, length), padded, passes = prompt.ids.shape, prompt.padded, self._captured.passes
        read = torch.stack([prompt.ids, prompt.positions]).flatten(1)
        numbers = torch.arange(rows * length)
        if padded is not None:
            places = padded.places_on_host
            numbers = torch.zeros_like(numbers).index_put_((places,), numbers[: len(places)])
            read = read[:, padded.places]
        kept = numbers.view(rows, length)[:, slice(None) if prompt.kept is None else prompt.kept]
        room = logits_room(kept.numel())
        keep = upload(torch.nn.functional.pad(kept.flatten(), (0, room - kept.numel())), read.device)
        records = prompt.cache.replays and room <= RECORDED_LOGITS
        reader, capacity = prompt.reader, None
        if records:
            stored = [reader.get_seq_length()] * rows
            capacity = passes.capacity(read.shape[1], stored, reader.groups, read.device)
        cache = PackedCache([(reader, read.shape[1])], padded=padded)
        try:
            with cache.planned(capacity):
                if cache.key is not None:
                    logits = passes.logits(cache, read, keep)
                else:
                    options = {CACHE: cache, "use_cache": True, "logits_to_keep": keep[: kept.numel()]}
                    logits = self._captured.forward(input_ids=read[:1], position_ids=read[1:], **options).logits[0]
        except BaseException:
            if reader is not prompt.cache:
                prompt.cache.reset()
            raise
        if reader is not prompt.cache:
            prompt.cache.seal()
        logits = logits[: kept.numel()].unflatten(0, kept.shape)
        return CausalLMOutputWithPast(logits=logits, **{CACHE: prompt.cache})


def _reader(cache: KVCache) -> KVCache | None:
    """The cache that a packed pass over a prompt fills; None where layers have to store it one by one."""
    if is_plain(cache):
        return cache
    whole = cache.heads_apart and cache.groups[0].seal_at_once and not cache.get_seq_length()
    return cache.reader() if whole else None


def takes(model: Any, *arguments: str) -> bool:
    """Whether a model's forward pass has arguments of these names."""
    return set(arguments) <= inspect.signature(model.forward).parameters.keys()


def max_positions(model: Any) -> int:
    """Positions that a model has; very many where it states none."""
    return context_length(model.config) or 1 << 40


def logits_room(count: int) -> int:
    """To how many logits those of a pass are padded."""
    return 1 << (count - 1).bit_length()


def _is_known(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a forward pass has no arguments but those of a packed one, and the model takes these."""
    if not takes(model, "position_ids", "logits_to_keep"):
        return False
    if any(getattr(model.config, extra, False) for extra in _EXTRAS):
        return False
    return other_arguments(arguments) is None


def _place(model: Any, ids: Tensor, cache: KVCache) -> Hashable:
    """What shapes, dtype and device of a cache's tokens depend on."""
    return model.dtype, ids.device, torch.is_autocast_enabled(ids.device.type), len(cache.layers)


def _kept(wanted: int | Tensor | None, length: int) -> list[int] | None:
    """Positions 0 to length - 1 that `logits_to_keep` means; None where it is neither a number nor a list of them."""
    if isinstance(wanted, Tensor):
        if wanted.dim() != 1 or wanted.is_floating_point() or wanted.dtype == torch.bool:
            return None
        return torch.arange(length)[wanted.cpu()].tolist()
    return list(range(length))[-wanted if wanted else 0 :]


def _without_padding(cache: KVCache, mask: Tensor, start: int, length: int) -> PaddedBatch | None:
    """The tokens of a pass with padding; None unless each row's, with those before, follow one another.

    Raises:
        CacheError: the mask differs for stored positions.
    """
    chunk, places = PassTokens(torch.arange(start, start + length, device=mask.device), mask), []
    for group in cache.groups:
        chunk.check_past(group.real, start, group.name)
    for row, sequence in enumerate(cache.groups[0].sequences):
        runs = chunk.runs(row, start, length)
        if len(sequence.extend(runs, 0).positions.runs()) > 1:
            return None
        places += [torch.arange(row * length + first - start, row * length + first - start + n) for first, n in runs]
    if not places:
        return None
    on_host = torch.cat(places)
    return PaddedBatch(chunk, upload(on_host, mask.device), on_host)


MOST_REPEATED = 16 * PART  # tokens of a forward pass


@checked
@torch.no_grad()
def seal_prompt(model: torch.nn.Module, cache: KVCache, input_ids: torch.Tensor) -> None:
    """State that a prompt is complete, as `KVCache.seal()`; it is read again first where the cache's scheme selects by
    reconstruction.

    `generate` of a bundle's model does this by itself.

    Args:
        model: the model that has read the prompt.
        cache: the cache that it was read into.
        input_ids: int64 [B, n], all tokens read so far, padding included.

    Raises:
        UsageError: the cache holds another number of tokens, or another batch.
    """
    if cache.reconstructs and any(sequence.open_from is not None for sequence in cache.groups[0].sequences):
        score_prompt(model, cache, input_ids)
    cache.seal()


@torch.no_grad()
def score_prompt(model: PreTrainedModel, cache: KVCache, input_ids: torch.Tensor) -> None:
    """Read a prompt again, so that the scores of its tokens are known; arguments and errors as of `seal_prompt`."""
    (batch, length), first = input_ids.shape, cache.groups[0]
    heads = first.stores[0].heads_apart
    if (batch * heads, length) != (first.rows, cache.get_seq_length()):
        raise UsageError(
            f"`input_ids` are {counted(batch, 'row')} of {length:,} tokens, and the cache holds {first.rows // heads} "
            f"of {cache.get_seq_length():,}; pass all tokens that were read into it."
        )
    real = torch.ones(batch, length, dtype=torch.int64) if first.real is None else first.real[::heads].long().cpu()
    before = real.cumsum(1) - 1  # index of a token among its sequence's own
    positions = context_length(model.config) or int(before.max()) + 1 + PART
    try:
        for start in range(0, length, MOST_REPEATED):
            stop = min(start + MOST_REPEATED, length)
            for group in cache.groups:
                group.repetition = (start, stop)
            own = before[:, start:stop].clamp(min=0)
            # The repetition of a part begins where the part ends, or earlier where positions end.
            begin = own[:, :1].clamp(min=first.scheme.sink_tokens)
            index = (own - begin).clamp(min=0)
            size = (own[:, -1:] + 1 - begin - index // PART * PART).clamp(0, PART)
            room = (positions - (own - index % PART + size)).clamp(min=0)
            model(
                input_ids=input_ids[:, start:stop].to(model.device),
                position_ids=(own + size.minimum(room)).to(model.device),
                use_cache=True,
                logits_to_keep=1,
                **{CACHE: cache},
            )
    finally:
        for group in cache.groups:
            group.repetition = None
    share_budget(cache.groups, heads)
