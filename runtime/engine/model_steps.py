"""A bundle's model and its cache as an Engine uses them: prompts in chunks beside a batch of decoding rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvconvert.errors import CacheError, UnsupportedModelError, UsageError
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.runtime.hf.cache import rotary_switch
from kvconvert.runtime.hf.captured import prepare_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def unsupported(model: PreTrainedModel) -> str | None:
    """Why an Engine cannot serve a model, or None."""
    if not hasattr(model, "new_kv_cache"):
        return "it was not loaded from a bundle with a KV plan"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{model.config.model_type} models take no position_ids, and the rows of a batch are at different ones"
    config = model.config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return (
            f"the chunks of {config.model_type} models' attention are counted from the beginning of the batch, and its "
            "rows begin at different positions"
        )
    return None


class ModelSteps:
    """One cache with a fixed number of rows, and the passes over it.

    Args:
        model: of a bundle with a KV plan.
        rows: of the batch.
        kv_memory: bytes for pages, see `KVCache`.

    Attributes:
        pages: that the empty cache can hold per layer, None where it grows.
        lag: steps by which results are read late: one on a GPU, which then computes the next step while the host reads.

    Raises:
        UnsupportedModelError: the model cannot be served.
        UsageError: the memory does not hold a page.
    """

    def __init__(self, model: PreTrainedModel, rows: int, kv_memory: int | None):
        if reason := unsupported(model):
            raise UnsupportedModelError(f"An Engine cannot serve this model: {reason}.")
        self.model, self.rows = model, rows
        self.device: torch.device = model.device
        self.lag = 1 if self.device.type == "cuda" else 0
        config = model.config.get_text_config(decoder=True)
        self.vocabulary: int = config.vocab_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        switch = rotary_switch(config)
        if switch is not None:  # a longer row would change what all other rows compute
            self.max_positions = switch
        self.cache = model.new_kv_cache(kv_memory=kv_memory)
        try:
            self.cache.open_rows(rows)
        except CacheError as error:
            raise UnsupportedModelError(f"An Engine cannot serve {config.model_type} models. {error}") from error
        self.pages: int | None = self.cache.free_pages()
        if self.pages is None and kv_memory is not None:
            # How many pages the memory holds is known once the first keys and values were seen.
            first = self.new_prompt()
            self.read_prompt(first, [0], 0, last=True)
            self.discard(first)
            self.pages = self.cache.free_pages()
        if self.pages == 0:
            raise UsageError(f"`kv_memory` = {kv_memory} bytes are not enough for one page of {PAGE_SIZE} tokens.")
        schemes = [scheme for scheme in self.cache.schemes if scheme is not None]
        self._whole_prompts = any(scheme.compresses_prompts() for scheme in schemes)

    def prepare(self) -> None:
        """Record decoding steps for sequences up to twice as long as those that the pages have room for on average."""
        if self.device.type != "cuda":
            return
        longest = 4096 if self.pages is None else 2 * self.pages * PAGE_SIZE // self.rows
        prepare_steps(self.model, [1] * self.rows, min(longest, self.max_positions or longest))

    def stop_token_ids(self) -> frozenset[int]:
        """The end-of-sequence tokens of the model's generation config."""
        ids = self.model.generation_config.eos_token_id
        return frozenset() if ids is None else frozenset(ids if isinstance(ids, list) else [ids])

    def pages_needed(self, prompt_tokens: int, new_tokens: int) -> int:
        """Pages that a sequence can come to; what is generated after a compressed prompt begins a page of its own."""
        if self._whole_prompts:
            return -(-prompt_tokens // PAGE_SIZE) + -(-new_tokens // PAGE_SIZE)
        return -(-(prompt_tokens + new_tokens) // PAGE_SIZE)

    def room(self, prompt_tokens: int) -> int | None:
        """New tokens that fit after a prompt of so many, at most 0 where none do; None without a limit."""
        limits = []
        if self.max_positions is not None:
            limits.append(self.max_positions - prompt_tokens)
        if self.pages is not None:
            begun = self.pages_needed(prompt_tokens, 0) * PAGE_SIZE if self._whole_prompts else prompt_tokens
            limits.append(self.pages * PAGE_SIZE - begun)
        return min(limits, default=None)

    def new_prompt(self) -> Any:
        """An empty cache for one prompt, whose pages come from those of the batch."""
        prompt = self.cache.beside()
        prompt.begin_prompt()
        return prompt

    @torch.no_grad()
    def read_prompt(self, prompt_cache: Any, ids: list[int], position: int, last: bool) -> Tensor:
        """Read the next tokens of a prompt.

        Args:
            prompt_cache: where they are stored.
            ids: of the tokens.
            position: of the first of them.
            last: whether the prompt ends with them.

        Returns:
            logits [1, V] of the token that follows.
        """
        positions = torch.arange(position, position + len(ids), device=self.device)[None]
        logits = self._logits(torch.tensor([ids], device=self.device), positions, prompt_cache, logits_to_keep=1)
        if last:
            prompt_cache.seal()
        return logits

    def join(self, row: int, prompt_cache: Any) -> None:
        """Move a complete prompt into a free row."""
        self.cache.join(row, prompt_cache)

    def leave(self, row: int) -> None:
        """Free a row."""
        self.cache.leave(row)

    def discard(self, prompt_cache: Any) -> None:
        """Free the pages of a prompt that will not be continued."""
        prompt_cache.reset()

    @torch.no_grad()
    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        """One pass over the newest token of every row; rows without a sequence are computed and not stored.

        Args:
            ids: int64 [rows].
            positions: int64 [rows].

        Returns:
            logits [rows, V].
        """
        return self._logits(ids[:, None], positions[:, None], self.cache)

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

    def _logits(self, ids: Tensor, positions: Tensor, cache: Any, **options: Any) -> Tensor:
        output = self.model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, return_dict=True, **options
        )
        return output.logits[:, -1]
