"""`KVCache`: a cache for transformers whose attention layers hold low-bit pages."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from collections.abc import Sequence as Sequence_
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionLayer,
)

from kvconvert.arguments import Count, File, Natural, checked
from kvconvert.errors import CacheError, UsageError, first_line
from kvconvert.methods import PLAN_TENSORS, UNQUANTIZED, KVScheme
from kvconvert.methods.scheme import FORMER_PLAN_TENSORS
from kvconvert.models import CACHE
from kvconvert.models.configuration import (
    HYBRID_LAYER_TYPES,
    Modality,
    has_pages,
    keeps_index,
    model_cache,
)
from kvconvert.models.devices import Device, choose_device
from kvconvert.runtime.cache import session
from kvconvert.runtime.cache.compress import compress, read_flags, seal, seal_together
from kvconvert.runtime.cache.forward_pass import ModalityMask
from kvconvert.runtime.cache.groups import LayerGroup, geometry
from kvconvert.runtime.cache.reconstruct import PredictedBudgets
from kvconvert.runtime.cache.sequence import OpenPolicy, Sequence
from kvconvert.runtime.cache.session import Snapshot
from kvconvert.runtime.cache.steps import TableRegistry
from kvconvert.runtime.cache.store import Group, LayerStore
from kvconvert.runtime.hf.cache_layers import CacheLayers, CacheStats, fingerprint_of
from kvconvert.runtime.hf.layer import (
    HeadwiseLayer,
    HybridLayer,
    IndexedLatentLayer,
    IndexedLayer,
    LatentLayer,
    PagedLayer,
    StateLayer,
)
from kvconvert.runtime.hf.packed import PackedCache

LOST = "the low-bit KV cache: something between kvconvert and the model replaced it."


class KVCache(Cache):
    """A low-bit key-value cache for any model whose attention goes through transformers' attention interface.

    Use it as `past_key_values`, with the model's attention implementation set to "kvconvert". On a model that is not a
    kvconvert bundle, a preset's folded value rotation is done at run time; results are the same up to rounding.

    Args:
        config: the model's config.
        scheme: a `KVScheme` or a preset's name, for all layers, or one per layer (None leaves a layer unquantized).
        plan: calibrated tensors by their names in a bundle's KV plan, `layers.{i}.{what}`.
        kv_memory: bytes for pages, over all layers, taken at once and never exceeded; None grows as needed.
            Full-precision tokens (sink tokens, residual windows, the prompt being processed) come on top.
        beside: another cache for this model, with which this one shares the storage of pages; see `beside()`.
        like: what was found for another cache of this model with the same scheme; None finds it.

    A scheme with `selection = "reconstruction"` has a prompt sealed by `seal_prompt`, which reads it again.

    Attributes:
        schemes: of all layers; None for one that is not quantized.
        groups: the bookkeeping of all layers with pages, see `runtime/cache/groups.py`.
        heads_apart: whether KV heads share a budget, so that each has rows of its own.
        replays: whether steps of a bundle's model over this cache may be replayed as CUDA graphs; every call of
            `generate` says it anew.
        is_replaced: the model has another cache of this kind made where transformers drops this one, see `__bool__`.
        placeholders: ids of the tokens of each modality that a scheme compresses.
        model_seal: of the manifest of the bundle whose model made this cache, "" for other models.

    Raises:
        UsageError: an argument of another type, a tensor that no KV plan has, or `kv_memory` has no room for a
            page in every layer.
        RecipeError: a scheme says that weights are folded and the model's are not, or the number of schemes is wrong.
        UnsupportedModelError: the layers' keys and values cannot be kept here (latent attention with a scheme that is
            not for latents, an attention of the model's own), or a scheme compresses a modality that the config has no
            token for.
    """

    @checked
    def __init__(
        self,
        config: Annotated[PretrainedConfig, "`model.config`, or AutoConfig.from_pretrained of a checkpoint"],
        scheme: Annotated[
            KVScheme | str | Sequence_[KVScheme | str | None],
            "a KVScheme, a preset's name, or a list with one of them or None for each layer",
        ],
        *,
        plan: Mapping[str, torch.Tensor] | None = None,
        kv_memory: int | None = None,
        beside: KVCache | None = None,
        like: CacheLayers | None = None,
    ):
        like = CacheLayers.of(config, scheme) if like is None else like
        self.like, self.schemes, self.heads_apart = like, like.schemes, like.heads_apart
        page_bytes = None if kv_memory is None else like.page_bytes(config, kv_memory)
        self._made_with = {"config": config, "scheme": scheme, "plan": plan, "kv_memory": kv_memory, "like": like}
        self._beside, self._reader = beside, None
        plans = _layer_plans(plan or {})
        layers = []
        heads = [own.heads for own in model_cache(config, self.schemes).layers] if self.heads_apart else []
        groups: dict[Hashable, Group] = {}
        for index, (layer_type, kwargs) in enumerate(zip(like.types, like.arguments, strict=True)):
            if not has_pages(layer_type):
                own = DYNAMIC_LAYER_TYPE_MAPPING[layer_type]
                has_states = own is LinearAttentionLayer
                layers.append(StateLayer(**kwargs, state_bits=like.state_bits) if has_states else own(**kwargs))
                continue
            layer_scheme, window = self.schemes[index] or UNQUANTIZED, kwargs.get("sliding_window")
            # Layers hold different numbers of tokens where heads share a budget.
            key = geometry(layer_scheme, window, like.shares_keys), index * self.heads_apart
            twin = None if beside is None else beside.layers[index].store
            if key not in groups:
                numbers = None if twin is None else (twin.group.key_numbers, twin.group.value_numbers)
                groups[key] = LayerGroup(layer_scheme, window, like.shares_keys, numbers)
                groups[key].made_for = like
            store = LayerStore(
                layer_scheme,
                index,
                groups[key],
                page_bytes=page_bytes,
                plan=plans.get(f"layers.{index}"),
                pages=twin,
                is_latent=like.is_latent,
            )
            store.in_chunks = layer_type == "chunked_attention"
            if keeps_index(layer_type):
                layers.append((IndexedLatentLayer if like.is_latent else IndexedLayer)(store))
            elif like.is_latent:
                layers.append(LatentLayer(store))
            elif self.heads_apart:
                store.heads_apart = heads[index]
                layers.append(HeadwiseLayer(store))
            elif layer_type in HYBRID_LAYER_TYPES:
                layers.append(HybridLayer(store, kwargs.get("number_of_states", 1), like.state_bits))
            else:
                layers.append(PagedLayer(store))
        super().__init__(layers=layers)
        self.groups = list(groups.values())
        if self.predicts:
            known = None if beside is None else beside.groups[0].policy.budgets
            budgets = known or PredictedBudgets([group.stores[0] for group in self.groups])
            for layer, group in enumerate(self.groups):
                group.policy.budgets, group.policy.layer = budgets, layer
        self.replays = True
        self.is_replaced = False
        self.model_seal = ""
        self.share_tables(TableRegistry() if beside is None else beside.groups[0].registry)
        self.placeholders = like.placeholders

    def __bool__(self) -> bool:
        """Whether anything is stored.

        A model whose rotary factors depend on length asks before each pass of `generate` that goes beyond its
        `rotary_switch`, and reads the whole sequence again with a cache of its own, in full precision, if this one
        holds no more tokens than that.

        Raises:
            CacheError: it would do so now.
        """
        stored = self.get_seq_length()
        if stored and stored == self.like.rotary_switch and not self.is_replaced:
            raise CacheError(
                f"This model turns keys by other factors beyond {stored:,} tokens, so that those in the cache would "
                f"have to be read again; end at {stored:,} tokens, begin with a longer prompt, or generate with a "
                "bundle of the model, which reads them again."
            )
        return stored > 0

    @checked
    def set_modality_mask(self, tokens: torch.Tensor | None, modality: Modality) -> None:
        """State which tokens of the next forward pass are visual, or audio: bool [B, T], T its new tokens.

        `watch_inputs(model)` does this automatically. Layers whose scheme compresses another modality, or all, ignore
        it. None withdraws the mask.
        """
        if tokens is not None and (tokens.dtype != torch.bool or tokens.dim() != 2):
            raise UsageError(f"`tokens` is {tokens.dtype} {[*tokens.shape]}; give bool [rows, new tokens].")
        mask = None if tokens is None else ModalityMask(tokens)
        for group in self.groups:
            if group.scheme.modality == modality:
                group.modality_mask = mask

    @property
    def reconstructs(self) -> bool:
        """Whether prompts have to be read again before they are sealed."""
        return any(scheme is not None and scheme.reconstructs for scheme in self.schemes)

    @property
    def predicts(self) -> bool:
        """Whether what is kept of a prompt is predicted; it may then be read into `reader`."""
        return self.heads_apart and self.schemes[0].predicts

    def begin_prompt(self) -> None:
        """State that the following forward passes read a prompt, part by part, until `seal()`.

        Schemes that compress whole prompts (spans, eviction) otherwise take a pass of a single token for the first step
        of decoding, and the prompt for complete: a last part of one token would then not belong to it. `generate` of a
        bundle's model does this by itself where it has a `prefill_chunk_size`, and so does an `Engine`.
        """
        for group in self.groups:
            group.reading_prompt = True

    def reader(self) -> KVCache:
        """The cache that a prompt is read into where scores are predicted: as one without eviction, KV heads side by
        side and in full precision, until `seal` lets each head have its tokens.
        """
        if self._reader is None:
            plain = {"heavy_ratio": 0.0, "recent_ratio": 0.0, "selection": "attention"}
            schemes = tuple(replace(scheme, **plain) for scheme in self.schemes)
            like = replace(self.like, schemes=schemes, heads_apart=False)
            given = self._made_with | {"scheme": schemes, "like": like}
            self._reader = KVCache(**given, beside=None if self._beside is None else self._beside.reader())
            self._reader.share_tables(self.groups[0].registry)
            for group in self._reader.groups:
                group.policy = OpenPolicy()
            self._reader.begin_prompt()
        return self._reader

    def _take_read(self) -> None:
        """Let KV heads have the tokens of a prompt that was read into `reader`."""
        reader = self._reader
        if reader is not None and reader.get_seq_length():
            for layer, other in zip(self.paged_layers(), reader.stores(), strict=True):
                layer.take_heads(other)
            self._reset_reader()

    def _reset_reader(self) -> None:
        if self._reader is not None:
            self._reader.reset()
            self._reader.begin_prompt()

    def reset(self) -> None:
        """Drop everything stored."""
        super().reset()
        self._reset_reader()

    def seal(self) -> None:
        """State that the prompt is complete.

        Schemes that compress whole prompts (spans, eviction) do so here, or else at the first single-token step unless
        `begin_prompt()` was called. Page methods have nothing left to do, except where later layers read earlier
        layers' keys again: there complete pages are written now instead of at the next step.
        """
        self._take_read()
        for group in self.groups:
            group.reading_prompt = False
        if self.heads_apart:
            for group in self.groups:
                group.seal_at_once = False
            seal_together(self.groups)
            return
        for group in self.groups:
            seal(group)

    def expect_whole_prompt(self) -> None:
        """State that the next forward pass holds the whole prompt, or the end of one that `begin_prompt` began.

        Each layer then compresses it before the next layer runs, so that the prefill's peak is one layer's keys and
        values. Where later layers read earlier layers' keys again, compression waits until the first step.
        """
        if self.reconstructs:  # what is kept is known when the prompt has been read again
            self.begin_prompt()
            return
        for group in self.groups:
            group.seal_at_once = not group.keep_for_sharing

    def share_tables(self, registry: TableRegistry) -> None:
        """Use the tables of a registry, which captured steps know by address."""
        for group in self.groups:
            group.registry, group.tables = registry, None

    @checked
    def open_rows(self, count: Count) -> None:
        """Make room for `count` sequences that join one by one; rows that none has joined store nothing.

        Raises:
            CacheError: the cache is not empty, or a layer is transformers' own or one that sequences cannot join.
        """
        if other := self._foreign_layers():
            raise CacheError(
                f"Sequences cannot join a cache with layers of transformers' own ({other}); generate in batches "
                "instead."
            )
        if self.reconstructs:
            raise CacheError(
                'Sequences cannot join a cache with selection = "reconstruction", whose prompts are read twice; '
                'generate in batches instead, or choose selection = "predicted".'
            )
        for group in self.groups:
            group.open_rows(count * group.stores[0].heads_apart)

    def resize_rows(self, count: int) -> None:
        """Have as many rows: later passes bring a token of each. The tokens of a sequence stay where they are.

        Raises:
            CacheError: a row that would be left out holds a sequence.
        """
        for group in self.groups:
            group.resize_rows(count * group.stores[0].heads_apart)
        for layer in self.state_layers().values():
            layer.resize(count)

    @contextmanager
    def receiving(self, reader: str) -> Iterator[None]:
        """Check that a forward pass within the context brings tokens here, unless it reads a prompt again.

        Args:
            reader: who runs it, for the message.

        Raises:
            CacheError: no token was stored: the model used another cache, or none.
        """
        before = self.get_seq_length()
        yield
        if self.get_seq_length() == before and all(group.repetition is None for group in self.groups):
            raise CacheError(f"{reader} read tokens, and none of them reached {LOST}")

    def beside(self) -> KVCache:
        """An empty cache whose pages lie in the same storage, for a prompt that will join this cache."""
        return KVCache(**self._made_with, beside=self)

    def packed(self, prompts: Sequence_[tuple[KVCache, int]], *, rows: bool) -> PackedCache:
        """What to pass as `past_key_values` of one forward pass over tokens of several caches.

        Args:
            prompts: caches made by `beside()`, and how many new tokens each has in the pass.
            rows: whether one token of every row of this cache comes before them.
        """
        own = [(self, self.groups[0].rows)] if rows else []
        return PackedCache([*own, *prompts], rows=rows)

    def allocate(self, rows: int, tokens: Sequence_[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Take shape, dtype and device of each layer's keys [H, 0, D] and values [H, 0, E] for a batch of so many rows.

        Returns:
            whether the cache is one of as many rows now; one that has tokens may have others.
        """
        for layer, (keys, values) in zip(self.paged_layers(), tokens, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(*(part.expand(rows, -1, -1, -1) for part in (keys, values)))
        return all(group.rows == rows for group in self.groups)

    def allocate_beside(self) -> bool:
        """Take shape, dtype and device of tokens from the cache that this one was made beside; whether it has them."""
        for layer in self.layers:
            if isinstance(layer, PagedLayer) and not layer.is_initialized:
                store, twin = layer.store, layer.store.pages
                if twin is None or not twin.knows_tokens:
                    return False
                store.group.sequences = store.group.sequences or (Sequence(),)
                store.adopt(twin, 1)
                layer.adopt()
        return True

    @checked
    def join(self, row: Natural, other: KVCache) -> None:
        """Move the only sequence of a cache made by `beside()` to a free row; the other cache is empty afterwards.

        Raises:
            CacheError: the row is taken, or the other cache does not hold one sealed sequence without padding.
        """
        for group, source in zip(self.groups, other.groups, strict=True):
            read_flags(source)
            group.join(row * group.stores[0].heads_apart, source)
        for layer in self.paged_layers():
            layer.adopt()
        copies = []
        for layer, twin in zip(self.state_layers().values(), other.state_layers().values(), strict=True):
            copies += layer.join(row, twin, self.groups[0].rows)
        _copy(copies)
        for twin in other.layers:
            twin.reset()

    def move_rows(self, moves: Mapping[int, int]) -> None:
        """Move sequences to free rows; `moves` has the new row by the old one.

        Raises:
            CacheError: a row does not exist, holds no sequence, or is not free.
        """
        for group in self.groups:
            heads = group.stores[0].heads_apart
            group.move_rows({heads * old + i: heads * new + i for old, new in moves.items() for i in range(heads)})
        _copy([pair for layer in self.state_layers().values() for pair in layer.move(moves)])

    @checked
    def leave(self, row: Natural) -> None:
        """Drop a row's sequence, whose pages are free at once.

        Raises:
            CacheError: the row holds none.
        """
        for group in self.groups:
            heads = group.stores[0].heads_apart
            for own in range(row * heads, (row + 1) * heads):
                group.leave(own)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that stored tokens depend on besides the tokens, see `fingerprint_of`."""
        return fingerprint_of(self._made_with["config"], self.schemes, self._made_with["plan"] or {}, self.model_seal)

    def snapshot(self, earlier: Snapshot | None = None) -> Snapshot:
        """The only sequence as it is now, for `restore` of a cache made by `beside()` of the same cache; see
        `Snapshot.take`.

        Raises:
            CacheError: there are several, it is padded, or whole prompts are compressed.
        """
        self._write_complete_pages()
        before = {} if earlier is None else earlier.states
        states = {i: layer.copies(before.get(i)) for i, layer in self.state_layers().items()}
        return Snapshot.take(self.groups, earlier, states)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot; the cache has to be empty. Its pages are shared, not copied."""
        snapshot.put(self.groups)
        self._go_on(snapshot.states)

    @checked
    def save(self, file: File) -> None:
        """Write what the cache holds of one sequence to a safetensors file, for `KVCache.load`.

        The tokens themselves are not in it: keep their ids, for `generate` wants them all.

        Raises:
            CacheError: there are several sequences, padding, layers of transformers' own, or a scheme that compresses
                whole prompts (spans, eviction).
            KvconvertError: the file cannot be written.
        """
        self._check_sessions()
        self._write_complete_pages()
        self.unread_flags(wait=True)
        states = {index: layer.copies() for index, layer in self.state_layers().items()}
        session.save(Path(file).absolute(), self.groups, self.fingerprint, states)

    @classmethod
    @checked
    def load(cls, file: File, like: torch.nn.Module | KVCache, *, device: Device | None = None) -> KVCache:
        """A cache that goes on from a file that `save` wrote, with the same numbers.

        Args:
            file: of a cache of the same model, KV schemes and KV plan.
            like: a bundle's model, which reads a token, so that what is loaded is compared with what it makes; or an
                empty cache made as the saved one was, which is filled and returned, and knows no shapes yet.
            device: of the tokens; None for the model's, or the CPU.

        Raises:
            CacheError: the file is no session, was changed, or is of another model, scheme, plan or dtype.
            UsageError: the model has no caches of its own, or the cache is not empty.
        """
        cache, dtype, place = like, None, torch.device("cpu") if device is None else choose_device(device)
        if not isinstance(like, KVCache):
            if not hasattr(like, "new_kv_cache"):
                raise UsageError(
                    "`like` is no model of a bundle; make an empty cache as the saved one was, and pass it."
                )
            cache, dtype = like.new_kv_cache(), like.dtype
            place = like.device if device is None else place
        if cache.get_seq_length() or any(store.is_allocated for store in cache.stores()):
            raise UsageError("`like` is a cache that holds tokens already; pass an empty one.")
        cache._check_sessions()
        try:
            with_states = [*cache.state_layers()]
            states = session.load(Path(file), cache.groups, cache.fingerprint, place, dtype, with_states)
            cache._go_on(states)
            if cache is not like:
                cache._check_made_by(like, file)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            cache.reset()
            raise CacheError(
                f"The session {file} cannot be loaded: its tensors do not fit this cache ({first_line(error)})."
            ) from error
        except BaseException:
            cache.reset()
            raise
        return cache

    @torch.no_grad()
    def _check_made_by(self, model: PreTrainedModel, file: str | Path) -> None:
        """Refuse (CacheError) tokens and states of other shapes than the model makes: it reads a token to show them."""
        one = model.new_kv_cache()
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True, **{CACHE: one})
        for index, (loaded, made) in enumerate(zip(self.layers, one.layers, strict=True)):
            if _shapes_of(loaded, self.get_seq_length()) != _shapes_of(made, 1):
                raise CacheError(
                    f"The session {file} cannot be loaded: what it holds of layer {index} is not what the model makes."
                )

    def _write_complete_pages(self) -> None:
        """Quantize, between passes, pages that were left for later layers to read."""
        for group in self.groups:
            if group.keep_for_sharing and not group.record_past:
                compress(group, seal=False)

    def _check_sessions(self) -> None:
        """Refuse what no file can hold (CacheError)."""
        if other := self._foreign_layers():
            raise CacheError(
                f"A cache with layers of transformers' own ({other}) cannot be saved; read the prompt again instead."
            )

    def _foreign_layers(self) -> str:
        """The classes of layers that keep something and are transformers' own; "" if there are none."""
        known = PagedLayer, StateLayer, DummyLayer
        return ", ".join(sorted({type(layer).__name__ for layer in self.layers if not isinstance(layer, known)}))

    def _go_on(self, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Go on with the sequence that the groups have been given, and with these states of its layers."""
        for layer in self.paged_layers():
            layer.adopt()
        for index, tensors in states.items():
            self.layers[index].go_on(tensors)

    def unread_flags(self, wait: bool = False) -> list[Any]:
        """Launches that have quantized pages and whose outcome is not known yet, see `read_flags`; none with `wait`.

        Raises:
            NumericError: keys or values could not be stored.
        """
        for group in self.groups:
            read_flags(group, wait)
        return [entry for group in self.groups for entry in group.unread_flags]

    def take_unread_flags(self) -> list[Any]:
        """What `unread_flags` gives, without a look at it: whoever takes it calls `raise_found`."""
        taken = [entry for group in self.groups for entry in group.unread_flags]
        for group in self.groups:
            group.unread_flags = []
            for store in group.stores:
                store.flag = None  # what is stored from now on raises another one
        return taken

    def free_pages(self) -> int | None:
        """Pages of 128 tokens that could still be written, in the group of layers with the fewest.

        None without a limit. One set by `kv_memory` is known in pages once the first keys and values were seen.
        """
        free = [
            numbers.capacity - numbers.used
            for group in self.groups
            for numbers in (group.key_numbers, group.value_numbers)
            if numbers.capacity is not None
        ]
        return min(free, default=None)

    def paged_layers(self) -> list[PagedLayer]:
        """The layers with pages."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def state_layers(self) -> dict[int, StateLayer | IndexedLayer]:
        """The layers with states or keys of an indexer, whether they have pages or not, by their numbers."""
        kinds = StateLayer, IndexedLayer
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, kinds)}

    def stores(self) -> list[LayerStore]:
        """What the layers with pages store."""
        return [layer.store for layer in self.paged_layers()]

    def stats(self) -> CacheStats:
        """Measure the cache; cheap enough for every step.

        Raises:
            NumericError: keys or values could not be stored.
        """
        for group in self.groups:
            read_flags(group)
        stores = [layer.store for layer in self.paged_layers() if layer.is_initialized]
        indices = [layer.index for layer in self.layers if isinstance(layer, IndexedLayer)]
        return CacheStats(
            tokens=max((store.tokens() for store in stores), default=0),
            residual_tokens=max((store.residual_tokens() for store in stores), default=0),
            pages=sum(store.pages_used() for store in stores),
            flushes=sum(store.flushes for store in stores),
            clamped_rows=sum(store.group.registry.clamped_rows(store) for store in stores),
            fallbacks=sum(store.fallbacks for store in stores),
            values=sum(store.numbers() for store in stores) + sum(index.numbers for index in indices),
            bytes_used=sum(store.bytes_used() for store in stores) + sum(index.bytes_used for index in indices),
            bytes_allocated=sum(store.bytes_allocated() for store in stores) + sum(index.nbytes for index in indices),
            other_layers=len(self.layers) - len(self.paged_layers()),
        )


def _copy(pairs: Sequence_[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy to the first tensor of each pair from the second, in one launch."""
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))


def _layer_plans(plan: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """A KV plan by layer, `layers.{i}`, and then by what follows in the tensors' names (UsageError: another name)."""
    plans: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in plan.items():
        layer, _, what = name.rpartition(".")
        if not re.fullmatch(r"layers\.\d+", layer) or what not in (*PLAN_TENSORS, *FORMER_PLAN_TENSORS):
            raise UsageError(
                f"`plan` has a tensor {name!r:.80}, which no KV plan has; give those of one, layers.0.key_mean and "
                "so on."
            )
        plans.setdefault(layer, {})[what] = tensor
    return plans


def _shapes_of(layer: CacheLayerMixin, tokens: int) -> list[Any]:
    """What the parts of a sequence of that many tokens are in a layer, whatever their numbers and lengths."""
    found: list[Any] = []
    if isinstance(layer, PagedLayer) and layer.is_initialized:
        found += [layer.store.format.keys, layer.store.format.values]
    if isinstance(layer, StateLayer):
        found += [(name, state.shape, state.dtype) for name, state in sorted(layer.tensors().items())]
    if isinstance(layer, IndexedLayer) and any(layer.index.counts):
        found += [layer.index.counts == [tokens], *((t.shape[2], t.dtype) for t in layer.index.stored())]
    return found
