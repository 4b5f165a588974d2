"""One model that is measured: loaded in a process of its own, and timed as `generate` streams its tokens."""

from __future__ import annotations

import gc
import importlib.resources
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.generation import BaseStreamer

from kvconvert.models.processors import load_tokenizer
from kvconvert.models.source import open_source
from kvconvert.runtime import KVCache, load

Name = Literal["bundle", "source", "source, compiled"]
PROMPT_CHUNK = 4096  # tokens that longer prompts are read in
ONE_PASS = 8192  # tokens up to which a prompt is read in one pass
WARM_UP = (64, 4)  # tokens of the prompt, and new ones, before a CPU is timed: it has nothing to compile or to capture
TEXT = "books-val.txt"


@dataclass(frozen=True)
class Measurement:
    """One model, batch size and length of prompts.

    Attributes:
        model: "bundle", "source" (DynamicCache) or "source, compiled" (StaticCache and torch.compile).
        batch: sequences.
        context: tokens of each prompt.
        first_token_seconds: from the call of `generate` to the first new token of all sequences.
        tokens_per_second: of all sequences together, after the first token.
        peak_memory: bytes; on a GPU everything allocated there, on a CPU the growth of the resident set since before
            the model was loaded; None where the system does not tell.
        kv_bytes_per_token: bytes of keys and values over all layers, by the tokens stored in the end.
        dtype: in which the model computes.
        failure: why there are no figures, or None.
    """

    model: Name
    batch: int
    context: int
    first_token_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory: int | None = None
    kv_bytes_per_token: float | None = None
    dtype: str | None = None
    failure: str | None = None


class TokenTimes(BaseStreamer):
    """Notes when the first and the latest token of `generate` reached the host."""

    def __init__(self) -> None:
        self.calls = 0
        self.first = self.latest = 0.0

    def put(self, value: Tensor) -> None:
        """Called with the prompt and then with each new token of the batch."""
        self.calls += 1
        self.latest = time.perf_counter()
        if self.calls == 2:
            self.first = self.latest

    def end(self) -> None:
        """Called after the last token."""


class Contender:
    """A loaded model.

    Args:
        name: which.
        directory: of the bundle or of the source.
        tokenizer: directory of the tokenizer, the same for all models.
        device: where it runs.
        dtype: of what is not packed; None takes what loading it gives by default.
    """

    def __init__(self, name: Name, directory: Path, tokenizer: Path, device: str, dtype: str | None):
        self.name, self.device = name, torch.device(device)
        self.baseline = resident_bytes()
        wanted = None if dtype is None else getattr(torch, dtype)
        if name == "bundle":
            model, _ = load(directory, dtype=wanted, verify="headers")
        else:
            model = open_source(str(directory)).load(wanted or "auto")
        # Decorators of transformers hide the signatures of `to` and `generate` from type checkers.
        self.model: PreTrainedModel = model.to(self.device).eval()  # type: ignore[arg-type]
        text = (importlib.resources.files("kvconvert.data.texts") / TEXT).read_text(encoding="utf-8")
        encoded = load_tokenizer(tokenizer)(text, add_special_tokens=False, verbose=False)  # longer than any prompt
        self.text_ids: list[int] = encoded.input_ids

    def measure(self, batch: int, context: int, new_tokens: int) -> Measurement:
        """Time one batch, after a run that compiles and captures whatever there is to."""
        ids = self._prompts(batch, context)
        if self.device.type == "cuda":
            self._generate(ids, new_tokens)
        else:
            self._generate(ids[:, : WARM_UP[0]], min(new_tokens, WARM_UP[1]))
        gc.collect()
        times = TokenTimes()
        with PeakMemory(self.device, self.baseline) as peak:
            begun = time.perf_counter()
            cache = self._generate(ids, new_tokens, streamer=times)
        return Measurement(
            model=self.name,
            batch=batch,
            context=context,
            first_token_seconds=times.first - begun,
            tokens_per_second=batch * (new_tokens - 1) / (times.latest - times.first),
            peak_memory=peak.bytes,
            kv_bytes_per_token=bytes_per_token(cache, batch * (context + new_tokens - 1)),
            dtype=str(self.model.dtype).removeprefix("torch."),
        )

    def _prompts(self, batch: int, context: int) -> Tensor:
        """Prose, [batch, context]; each row another stretch of it, repeated where it is too short."""
        length = len(self.text_ids)
        starts = [row * (length // batch) for row in range(batch)]
        rows = [[self.text_ids[(start + i) % length] for i in range(context)] for start in starts]
        return torch.tensor(rows, device=self.device)

    def _generate(self, ids: Tensor, new_tokens: int, streamer: BaseStreamer | None = None) -> Cache:
        options: dict[str, Any] = {"cache_implementation": "static"} if self.name == "source, compiled" else {}
        if ids.shape[1] > ONE_PASS:
            options["prefill_chunk_size"] = PROMPT_CHUNK
        return self.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=streamer,
            return_dict_in_generate=True,
            **options,
        ).past_key_values


def bytes_per_token(cache: Cache, tokens: int) -> float:
    """Bytes of keys and values, or of what stands for them, over all layers, by the tokens stored in all sequences."""
    if isinstance(cache, KVCache):
        return cache.stats().bytes_used / tokens
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor)) / tokens


_STATM = Path("/proc/self/statm")  # Linux alone has it
SECONDS = 0.005  # between two looks at the resident set


class PeakMemory:
    """Bytes at the worst moment within `with`: allocated on a GPU, or growth of the resident set since `baseline`.

    Args:
        device: where the model is.
        baseline: bytes of the resident set before the model was loaded, from `resident_bytes`.

    Attributes:
        bytes: the peak, after the block; None where it cannot be measured.
    """

    def __init__(self, device: torch.device, baseline: int | None):
        self.device, self.baseline = device, baseline
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.baseline is not None:
            self._over = threading.Event()
            self._highest = 0
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        elif self.baseline is not None:
            self._over.set()
            self._thread.join()
            self.bytes = max(0, max(self._highest, resident_bytes() or 0) - self.baseline)

    def _watch(self) -> None:
        while not self._over.wait(SECONDS):
            self._highest = max(self._highest, resident_bytes() or 0)


def resident_bytes() -> int | None:
    """Bytes of this process in memory, None where the system does not tell."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
