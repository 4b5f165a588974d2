"""A bundle's model and its cache as an Engine uses them: one pass for decoding rows and chunks of prompts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvconvert.errors import CacheError, UnsupportedModelError, UsageError, counted, first_line
from kvconvert.kernels.device import compiles, upload
from kvconvert.kernels.launches import make_ready, record_specializations
from kvconvert.kernels.linear import keep_values
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.kernels.sampling import sample
from kvconvert.models import CACHE
from kvconvert.models.configuration import changing_rope, context_length, is_latent
from kvconvert.runtime.cache.compress import raise_found
from kvconvert.runtime.cache.prompt_pass import TableCapacity
from kvconvert.runtime.hf.cache_layers import rotary_switch
from kvconvert.runtime.hf.captured import ShortBatch, prepare_steps, tokens_with_pages
from kvconvert.runtime.hf.captured_passes import MOST_TOKENS, PromptPlaces
from kvconvert.runtime.hf.fused_modules import packed_linears
from kvconvert.runtime.hf.layer import StateLayer
from kvconvert.runtime.hf.prompts import takes
from kvconvert.runtime.hf.rehearsal import rehearse, shortened
from kvconvert.runtime.hf.sequence_modules import asks_length
from kvconvert.runtime.hf.states import bytes_of_states, not_split, reads_places, state_bits, state_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def rehearse_engine(model: PreTrainedModel) -> None:
    """`rehearse`, and what an Engine launches beyond; within `record_specializations`."""
    rehearse(model)
    with shortened(model):
        try:
            steps = ModelSteps(model, 2, None)
        except UnsupportedModelError:
            return
        steps.rehearse()


# Tokens per row that steps are recorded for where the cache has no limit, and of one row alone.
LONGEST_UNKNOWN, LONGEST_ALONE = 2048, 32768
# Of the tables of pages.
MOST_TABLE_BYTES = 1 << 28
# Rows of steps where no request has a later one: as many as a GPU's fastest products of packed weights take, and twice
# as many, and so on. On a CPU every row takes time, and the least is one.
FEW_ROWS = 16

# Tokens of the passes of a rehearsal, beside decoding rows and without them.
REHEARSED_CHUNKS = (300, 1, 2, 3, 5, 9, 17, 257)


def unsupported(model: PreTrainedModel) -> str | None:
    """Why an Engine cannot serve a model, or None."""
    if not hasattr(model, "new_kv_cache"):
        latent = hasattr(model, "config") and is_latent(model.config)
        way = "a recipe for latent attention, such as latent-4bit" if latent else "a low-bit cache, such as kv-only's"
        return f"it was not loaded from a bundle with a KV plan; convert it with {way}, or call its `generate`"
    if not takes(model, "position_ids"):
        return f"{model.config.model_type} models take no position_ids, and the rows of a batch are at different ones"
    if _drops_positions(model):
        return f"{model.config.model_type} models count positions in a way of their own, for one sequence at a time"
    text = model.config.get_text_config(decoder=True)
    if model.config.model_type == "gemma4_unified" and text.use_bidirectional_attention == "vision":
        return "gemma4_unified models mask tokens by where they stand in a pass, whether or not it has images"
    return not_split(model)


def _drops_positions(model: PreTrainedModel) -> bool:
    """Whether `generate` of a model leaves out the positions that it is given."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        made = model.prepare_inputs_for_generation(token, is_first_iteration=True, use_cache=True, position_ids=token)
    except Exception:  # code of any model, which may take more than a token
        return False
    return "position_ids" not in made


@dataclass(frozen=True, eq=False)
class PromptChunk:
    """Tokens of one prompt that a pass reads.

    Attributes:
        row: that the prompt will join.
        cache: where its tokens are stored, of `ModelSteps.new_prompt`.
        ids: of the tokens.
        position: of the first of them.
        last: whether the prompt ends with them.
        inputs: of a prompt with images, which is read whole, by a pass of its own: what `ModelSteps.inputs` gave.
    """

    row: int
    cache: Any
    ids: Sequence[int]
    position: int
    last: bool
    inputs: Mapping[str, Any] | None = None

    @property
    def positions(self) -> range:
        """Of all of the tokens."""
        return range(self.position, self.position + len(self.ids))


class ModelSteps:
    """One cache with a fixed number of rows, and the passes over it.

    Args:
        model: of a bundle with a KV plan.
        rows: the rows of the batch.
        kv_memory: bytes for pages, see `KVCache`, and for the rows' states.

    Attributes:
        pages: that the empty cache can hold per layer, None where it grows.
        whole_prompts: whether some layer compresses prompts as a whole.
        lag: steps by which results are read late: one on a GPU, which then computes the next step while the host reads.

    Raises:
        UnsupportedModelError: the model cannot be served.
        UsageError: `model` is none, or the memory does not hold the states and a page.
    """

    def __init__(self, model: PreTrainedModel, rows: int, kv_memory: int | None):
        if not hasattr(model, "forward"):
            raise UsageError(f"`model` is of type {type(model).__name__}; give the model that `load` returns.")
        if reason := unsupported(model):
            raise UnsupportedModelError(f"An Engine cannot serve this model: {reason}.")
        self.model, self.rows = model, rows
        self.device: torch.device = model.device
        self.lag = 1 if self.device.type == "cuda" else 0
        config = model.config.get_text_config(decoder=True)
        # Without it logits of all tokens are computed.
        self._keeps_logits = takes(model, "logits_to_keep")
        # Attention that asks for the length of its cache gets one for each token of a packed pass.
        self._packs_rows = any(map(asks_length, model.modules()))
        self.vocabulary: int = config.vocab_size
        self.max_positions = context_length(config)
        if changing_rope(config) is not None:  # a longer row would change what all other rows compute
            self.max_positions = rotary_switch(config) or config.max_position_embeddings
        self._joined: list[Any] = []
        self._taken: set[int] = set()  # rows that hold a sequence
        # How many rows decoding steps may have, ascending, and how many the cache has now.
        least = FEW_ROWS if compiles(self.device) else 1
        fewer = (least * 2**power for power in range(rows.bit_length()))
        self._widths, self._width = [*(width for width in fewer if width < rows), rows], rows
        if kv_memory is not None and self.state_bytes:
            if kv_memory <= self.state_bytes:
                raise UsageError(
                    f"`kv_memory` = {kv_memory:,} bytes are not enough for the recurrent states of "
                    f"{counted(rows, 'sequence')}, which take {self.state_bytes:,}; give more, or a smaller "
                    "`max_batch`."
                )
            kv_memory -= self.state_bytes
        self.cache = model.new_kv_cache(kv_memory=kv_memory)
        try:
            if self.cache.heads_apart and self._packs_rows:
                raise CacheError(
                    "its attention depends on a sequence's length, and KV heads with rows of their own are read apart"
                )
            self.cache.open_rows(rows)
        except CacheError as error:
            reason = str(error)
            raise UnsupportedModelError(
                f"An Engine cannot serve this {config.model_type} model: {reason[0].lower()}{reason[1:]}"
            ) from error
        self.pages: int | None = self.cache.free_pages()
        if self.pages is None and kv_memory is not None:
            # How many pages the memory holds is known once the first keys and values were seen.
            first, none = self.new_prompt(), torch.zeros(rows, dtype=torch.int64, device=self.device)
            _, failures = self.forward(none, none, False, [PromptChunk(0, first, [0], 0, last=True)])
            for error in failures.values():
                raise error
            self.discard(first)
            self.pages = self.cache.free_pages()
        if self.pages == 0:
            raise UsageError(f"`kv_memory` = {kv_memory:,} bytes are not enough for one page of {PAGE_SIZE} tokens.")
        schemes = [scheme for scheme in self.cache.schemes if scheme is not None]
        self.whole_prompts = any(scheme.compresses_prompts() for scheme in schemes)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of all rows."""
        if not state_modules(self.model):
            return 0
        bits = state_bits(self.model, self.model.kv_schemes)
        return self.rows * bytes_of_states(self.model, bits, self.model.dtype, self.device)

    def keep_weights(self) -> None:
        """Keep packed weights in 16 bits, too: before `prepare`, whose recordings know them.

        Raises:
            UsageError: no kernels read packed weights on this device, or there are none.
        """
        with torch.no_grad():
            kept = keep_values(packed_linears(self.model), self.model.dtype)
        if not kept:
            raise UsageError(
                "`keep_weights` is not possible: the model has no packed weights that a GPU's kernels read."
            )

    def prepare(self, chunk: int, most_tokens: int = 0) -> None:
        """Have all kernels compiled that any pass launches, record decoding steps for rows of any lengths that the
        pages have room for, and run the longest pass, for which libraries are loaded and memory is taken.

        Args:
            chunk: tokens of a prompt in one pass.
            most_tokens: of all prompts in one pass; fewer than `chunk` for those of one.
        """
        if self.device.type != "cuda":
            return
        with record_specializations() as launches:
            rehearse_engine(self.model)
        make_ready(launches, self.device)
        captured = self.model.captured
        captured.has_kernels = True
        unknown = max(LONGEST_UNKNOWN * self.rows, LONGEST_ALONE)
        tokens = unknown if self.pages is None else self.pages * PAGE_SIZE
        most = min(tokens, self.max_positions or tokens)
        # One table for all lengths: recordings know its address.
        entry_bytes = 8 * (2 * len(self.cache.layers) + PAGE_SIZE) * self.rows
        for width in self._widths:
            captured.registry.least_entries[width] = min(most // PAGE_SIZE + 4, MOST_TABLE_BYTES // entry_bytes)
        self.prepare_steps(tokens, most)
        chunk, most_tokens = max(1, min(chunk, most // 2)), max(1, min(max(chunk, most_tokens), tokens // 2))
        self.model.captured.passes.include(self.rows + most_tokens)
        logits = self._read_prompts(chunk, most_tokens)
        self._record_passes(chunk, most_tokens)
        for width in self._widths:
            self._draw(logits[:width])
        # Recordings have memory of their own, and passes without one are rare.
        del logits
        gc.collect()
        torch.cuda.empty_cache()

    def prepare_steps(self, tokens: int, most: int) -> None:
        """Record decoding steps for as many tokens as the pages hold, of which a row has at most so many.

        Args:
            tokens: of all rows.
            most: of one row.
        """
        for width in reversed(self._widths):  # fewer rows share the slots of more
            self._prepare_steps(width, tokens, most)

    def _prepare_steps(self, rows: int, tokens: int, most: int) -> None:
        """`prepare_steps` for so many rows."""
        # Work is divided by how much of it there is, and by how much of it is one row's; rows without pages get none,
        # and free ones have none in full precision either.
        with_pages = tokens_with_pages([group.scheme for group in self.cache.groups])
        batch = ShortBatch.read(self.model, [min(with_pages, most)] * rows)
        if batch is not None and not batch.takes_any_length:
            batch = None
        ones = [1] * rows
        prepare_steps(self.model, ones, 1, batch=batch)
        for growing in sorted({rows, -(-rows // 4), -(-rows // 16), 1}, reverse=True):
            longest = min(most, 2 * tokens // (growing + 1))
            for others in (1, 0) if growing < rows else (1,):
                begin = [min(with_pages, longest)] * growing + [others] * (rows - growing)
                prepare_steps(self.model, begin, longest, growing, batch=batch)
        # For what is left, so that nothing is recorded while requests wait.
        prepare_steps(self.model, ones, 1, most_room=True, batch=batch)
        if batch is not None:
            batch.cache.reset()

    def _read_prompts(self, chunk: int, tokens: int) -> Tensor:
        """Logits of a pass over the rows and prompts of `tokens` tokens together, of at most `chunk` each, which leave
        no trace.
        """
        none = torch.zeros(self.rows, dtype=torch.int64, device=self.device)
        count = min(self.rows, -(-tokens // chunk))
        prompts = [self.new_prompt() for _ in range(count)]
        ids = [0] * min(chunk, tokens // count)
        chunks = [PromptChunk(row, prompt, ids, 0, last=True) for row, prompt in enumerate(prompts)]
        logits, _ = self.forward(none, none, True, chunks)
        self._place_states(prompts[0])
        for prompt in prompts:
            self.discard(prompt)
        return logits

    @property
    def _records(self) -> bool:
        """Whether passes over prompts can be recorded: states, if there are any, have fixed addresses."""
        layers = self.cache.state_layers().values()
        placed = self.model.captured.passes.places is not None
        return self._keeps_logits and all(placed and isinstance(x, StateLayer) and x.tensors() for x in layers)

    def _place_states(self, prompt: Any) -> None:
        """Let states have fixed addresses, once a prompt has shown what they are: those of rows, and where passes can
        be recorded those of the prompts that these read.
        """
        own, passes = self.cache.state_layers(), self.model.captured.passes
        for layer, twin in zip(own.values(), prompt.state_layers().values(), strict=True):
            if isinstance(layer, StateLayer) and not layer.tensors():
                zeros = {name: t.new_zeros(self.rows, *t.shape[1:]) for name, t in twin.tensors().items()}
                layer.hold(zeros)
        kinds = {type(layer) for layer in own.values()}
        if passes.places is None and kinds == {StateLayer} and reads_places(self.model, self.device):
            passes.places = PromptPlaces(prompt, TableCapacity.of(MOST_TOKENS))

    def _record_passes(self, chunk: int, most_tokens: int) -> None:
        """Record passes of all sizes over the rows and prompts of at most so many tokens; arguments as for `prepare`.

        The smallest comes first, to be launched, and to be tested when it is recorded; then the largest, whose memory
        has room for all others.
        """
        passes = self.model.captured.passes
        if not self._records:
            return
        counts = [min(size - self.rows, most_tokens) for size in passes.sizes if passes.padded(size, self.device)]
        counts = sorted({count for count in counts if count > 0}, reverse=True)
        with passes.preparing():
            for count in (*3 * counts[-1:], *counts[:-1]):
                self._read_prompts(chunk, count)

    def _draw(self, logits: Tensor) -> None:
        """Choose tokens in every way, from logits as passes give them and from changed ones."""
        none = torch.zeros(len(logits), dtype=torch.int64, device=self.device)
        ones = torch.ones(len(logits), device=self.device)
        for each in (logits, logits.float()):
            for restrict in (True, False):
                sample(each, ones, none, ones / 2, none, none, restrict=restrict)

    def rehearse(self) -> None:
        """Run passes of every kind over the empty cache, which it has to itself; within `record_specializations`."""
        none = torch.zeros(self.rows, dtype=torch.int64, device=self.device)
        for width in self._widths:
            self._draw(torch.zeros(width, self.vocabulary, dtype=self.model.dtype, device=self.device))
        most = self.max_positions or sum(REHEARSED_CHUNKS) + 1
        for decodes in (False, True):
            first, second = self.new_prompt(), self.new_prompt()
            begin = 0
            for length in REHEARSED_CHUNKS:
                if begin + length >= most:
                    break
                chunks = [PromptChunk(0, first, [0] * length, begin, last=False)]
                if self.rows > 1 and begin == 0:
                    chunks.append(PromptChunk(1, second, [0] * length, 0, last=True))
                self.forward(none, none, decodes, chunks)
                begin += length
            self.discard(first)
            self.discard(second)

    def pages_needed(self, prompt_tokens: int, new_tokens: int) -> int:
        """Pages that a sequence can come to; what is generated after a compressed prompt begins a page of its own."""
        if self.whole_prompts:
            return -(-prompt_tokens // PAGE_SIZE) + -(-new_tokens // PAGE_SIZE)
        return -(-(prompt_tokens + new_tokens) // PAGE_SIZE)

    def room(self, prompt_tokens: int) -> int | None:
        """New tokens that fit after a prompt of so many, at most 0 where none do; None without a limit."""
        limits = []
        if self.max_positions is not None:
            limits.append(self.max_positions - prompt_tokens)
        if self.pages is not None:
            begun = self.pages_needed(prompt_tokens, 0) * PAGE_SIZE if self.whole_prompts else prompt_tokens
            limits.append(self.pages * PAGE_SIZE - begun)
        return min(limits, default=None)

    def new_prompt(self) -> Any:
        """An empty cache for one prompt, whose pages come from those of the batch."""
        prompt = self._joined.pop() if self._joined else self.cache.beside()
        prompt.begin_prompt()
        return prompt

    def join(self, row: int, prompt_cache: Any) -> Callable[[], None]:
        """Move a complete prompt into a free row.

        Returns:
            what raises a NumericError if the prompt could not be stored; it waits for the pass that read it.
        """
        flushes = prompt_cache.take_unread_flags()
        if row >= self._width:
            self._resize(self.rows)
        self.cache.join(row, prompt_cache)
        self._taken.add(row)
        # It is empty now; making one takes milliseconds.
        self._joined.append(prompt_cache)
        return partial(raise_found, flushes)

    def leave(self, row: int) -> None:
        """Free a row."""
        self.cache.leave(row)
        self._taken.discard(row)

    def width(self, rows: int) -> int:
        """The number of rows of a pass without prompts over the first `rows` rows."""
        return next(width for width in self._widths if rows <= width)

    def move(self, moves: Mapping[int, int]) -> None:
        """Move sequences to free rows; `moves` has the new row by the old one."""
        self.cache.move_rows(moves)
        self._taken = self._taken - {*moves} | {*moves.values()}

    def discard(self, prompt_cache: Any) -> None:
        """Free the pages of a prompt that will not be continued."""
        prompt_cache.reset()

    def inputs(self, ids: Sequence[int], extras: Mapping[str, Tensor]) -> tuple[dict[str, Any], int]:
        """The arguments of the pass that reads a prompt with images, as `generate` has them, but for the cache.

        Args:
            ids: of the prompt.
            extras: what else the model's processor makes of it, such as `pixel_values`.

        Returns:
            the arguments, and what is added to later tokens' numbers to have their positions: where an image's tokens
            share some, those that follow it come earlier.

        Raises:
            UsageError: they do not belong together.
        """
        tokens = torch.tensor([ids])
        if extras and not any(takes(self.model, name) for name in extras):
            raise UsageError(
                f"`extras` has {', '.join(extras)}, and this model takes none of them; give its token ids alone."
            )
        try:
            prepared = {"input_ids": tokens, **extras}
            positions = self.model._prepare_position_ids_for_generation(tokens, prepared)
            options: dict[str, Any] = {"use_cache": True, "position_ids": positions}
            if self._keeps_logits:
                options["logits_to_keep"] = 1
            made = self.model.prepare_inputs_for_generation(tokens, is_first_iteration=True, **options, **extras)
        except Exception as error:  # whatever transformers meets in tensors that are not those of the prompt
            raise UsageError(f"`extras` do not belong to the prompt ({first_line(error)}).") from error
        return made, int(made.get("position_ids", positions).flatten()[-1]) + 1 - len(ids)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, positions: Tensor, decodes: bool, chunks: Sequence[PromptChunk]
    ) -> tuple[Tensor, dict[PromptChunk | None, Exception]]:
        """The newest token of every row and chunks of prompts, or one of the two: in one pass, but for prompts with
        images, of which each has its own, and for rows whose KV heads are apart, which have one beside that of prompts.

        Args:
            ids, positions: of the rows' newest tokens, int64 [rows].
            decodes: whether they are read; rows without a sequence are computed and not stored.
            chunks: of different prompts; those that end are sealed.

        Returns:
            logits [n, V] of the token after each row's newest one, or after the prompt that ends in this pass and will
            join that row; meaningless in other rows, and in all of them if there is neither. n is at most `rows`, and
            all rows with a sequence are among them. And what a prompt's cache, or under None that of the rows, failed
            with while the others went on.
        """
        alone = [chunk for chunk in chunks if chunk.inputs is not None]
        packed = [chunk for chunk in chunks if chunk.inputs is None]
        passes = [(decodes, packed)] if decodes or packed else []
        if self.cache.heads_apart and decodes and packed:
            # Rows know the shapes of tokens once a prompt has joined them.
            passes = [(True, [])] * bool(self._taken) + [(False, packed)]
        if not alone and len(passes) == 1:
            return self._packed(ids, positions, *passes[0])
        logits = torch.zeros(self.rows, self.vocabulary, dtype=self.model.dtype, device=self.device)
        failures: dict[PromptChunk | None, Exception] = {}
        for rows, some in passes:
            try:
                read, found = self._packed(ids, positions, rows, some)
                failures |= found
                if rows:
                    logits[: len(read)] = read
                for chunk in some:
                    logits[chunk.row] = read[chunk.row]
            except Exception as error:
                failures |= dict.fromkeys([*([None] if rows else []), *some], error)
        if alone:
            self._resize(self.rows)
        for chunk in alone:
            try:
                logits[chunk.row] = self._read_alone(chunk)
            except Exception as error:
                failures[chunk] = error
        return logits, failures

    def _read_alone(self, chunk: PromptChunk) -> Tensor:
        """Logits [V] after a prompt with images."""
        inputs = {
            name: x.to(self.device, self.model.dtype if x.is_floating_point() else x.dtype)
            if isinstance(x, Tensor)
            else x
            for name, x in chunk.inputs.items()
        }
        logits = self.model(**inputs, return_dict=True, **{CACHE: chunk.cache}).logits
        if chunk.last:
            chunk.cache.seal()
        return logits[0, -1]

    def _packed(
        self, ids: Tensor, positions: Tensor, decodes: bool, chunks: Sequence[PromptChunk]
    ) -> tuple[Tensor, dict[PromptChunk | None, Exception]]:
        """`forward` in one pass."""
        if not chunks:
            count = self._resize(self.width(max(self._taken, default=0) + 1))
            if not self._packs_rows:
                return self._logits(ids[:count, None], positions[:count, None], self.cache)[:, -1], {}
            cache = self.cache.packed([], rows=True)
            with cache.planned(), cache.launches():
                return self._logits(ids[None, :count], positions[None, :count], cache)[0], {}
        apart, passes, capacity = self.cache.heads_apart, self.model.captured.passes, None
        # On a GPU passes with prompts have one number of rows, on a CPU those that a step has.
        width = self.rows if compiles(self.device) else self.width(max(self._taken, default=0) + 1)
        if not apart:
            self._resize(width)
        tokens = [(chunk.cache.reader() if apart else chunk.cache, len(chunk.ids)) for chunk in chunks]
        count = width * (not apart) + sum(count for _, count in tokens)
        # Recorded passes are alike: rows are always computed, and those with a sequence would store a token.
        if self._records and (apart or decodes or not self._taken):
            groups = tokens[0][0].groups if apart else self.cache.groups
            capacity = passes.capacity(count, [chunk.position for chunk in chunks], groups, self.device)
        decodes = not apart and (decodes or capacity is not None)
        own = width if decodes else 0
        ends = [own + end - 1 for end in accumulate(count for _, count in tokens)]
        kept = [*range(own), *[0] * (max(width, *(chunk.row + 1 for chunk in chunks)) - own)]
        for chunk, end in zip(chunks, ends, strict=True):
            if chunk.last:
                kept[chunk.row] = end
        read = upload([[i for c in chunks for i in c.ids], [p for c in chunks for p in c.positions]], self.device)
        if decodes:
            read = torch.cat([torch.stack([ids[:own], positions[:own]]), read], 1)
        cache = self.cache.packed(tokens, rows=decodes)
        keep = upload(kept, self.device)
        with cache.planned(capacity, passes.places):
            if cache.key is not None:
                logits = passes.logits(cache, read, keep)
            elif self._keeps_logits:
                with cache.launches():
                    logits = self._logits(*read[:, None], cache, logits_to_keep=keep)[0]
            else:
                with cache.launches():
                    logits = self._logits(*read[:, None], cache)[0, keep]
        parts = [None, *chunks] if decodes else chunks
        failures = {part: s.error for part, s in zip(parts, cache.segments, strict=True) if s.error is not None}
        for chunk in chunks:
            if chunk.last and chunk not in failures:
                try:
                    chunk.cache.seal()
                except Exception as error:
                    failures[chunk] = error
        return logits, failures

    def fetch(self, tokens: Tensor) -> Callable[[], list[int]]:
        """Begin to copy tokens to the host; the result waits for them."""
        if self.device.type != "cuda":
            return tokens.tolist
        copied = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        copied.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> list[int]:
            done.synchronize()
            return copied.tolist()

        return wait

    def _resize(self, width: int) -> int:
        """Let the cache have so many rows, and return their number."""
        if width != self._width:
            self.cache.resize_rows(width)
            self._width = width
        return width

    def _logits(self, ids: Tensor, positions: Tensor, cache: Any, **options: Any) -> Tensor:
        output = self.model(
            input_ids=ids, position_ids=positions, use_cache=True, return_dict=True, **{CACHE: cache}, **options
        )
        return output.logits
