"""The Engine: requests join and leave one batch while it decodes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from kvconvert.arguments import Count, Natural, checked
from kvconvert.errors import KvconvertError, NumericError, UsageError
from kvconvert.kernels.device import upload
from kvconvert.kernels.launches import skips_launches
from kvconvert.models.positions import check_chunk
from kvconvert.runtime.engine.model_steps import ModelSteps, PromptChunk
from kvconvert.runtime.engine.prefixes import Prefixes, no_prefixes
from kvconvert.runtime.engine.request import EngineStats, Event, FinishReason, Request, UnreadStep, new_request
from kvconvert.runtime.engine.sampling import (
    NO_NUMBERS,
    Sampling,
    check_settings,
    has_numbers,
    log_probabilities,
    recommended,
)
from kvconvert.runtime.engine.scheduler import RowState, Scheduler
from kvconvert.runtime.hf.load import generation_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
# Fields of generation_config.json that `generate` knows and requests of a batch do not.
_NOT_APPLIED = ("num_beams", "num_return_sequences", "guidance_scale", "max_time", "token_healing")
NO_TOKEN = -1  # where the logits have NaN or infinity, by which none can be chosen
FAILED = "A step of the engine failed; its requests have ended and the others go on."


class Engine:
    """Continuous batching of a bundle's model over one low-bit cache.

    Requests wait in a queue until a row of the batch and pages for all their tokens are free, first come, first served.
    Each step is one pass of the model: it reads a chunk of each of the oldest unread prompts, as many as fit, and
    decodes one token of every running request.

    `add`, `Request.cancel` and `stats` may be called from any thread, while another one steps. `step` and what calls it
    (`run`, `stream`) may be called from several threads, too; steps then follow one another.

    Args:
        model: of a bundle with a KV plan, as `load` returns it.
        tokenizer: for text and stop strings; without one, requests are tokens alone.
        kv_memory: bytes for pages over all layers and for the recurrent states of `max_batch` sequences, taken at
            once; None grows as needed. Sink tokens, residual windows, and the prompt being read come on top.
        max_batch: rows, the number of requests that are decoded together.
        prompt_chunk: tokens of one prompt that a step reads at most.
        max_batch_tokens: tokens of all prompts that a step reads at most.
        max_waiting: requests that may wait; `add` refuses more. None for any number.
        prefix_caching: keep what chunks of prompts have stored, and let prompts that begin with the same chunks go on
            from there. Kept pages take what room requests leave in `kv_memory`; without that, at most that of 131,072
            tokens. None does so where it is possible: where no layer compresses prompts as a whole (spans, eviction)
            and `prompt_chunk` is a multiple of 128.
        keep_weights: keep packed weights in 16 bits, too, so that no pass over a long prompt dequantizes them: two
            bytes more for each weight, on a GPU, as long as the model stays there. Results do not depend on it.
        prompt_lookup_num_tokens: refused; `model.generate` takes it.
        assistant_model: refused, too.

    Attributes:
        generation: what the model's generation_config.json says, as far as requests apply it; the rest is warned of.

    Raises:
        UsageError: an argument or a generation setting that cannot be used.
        BundleError: a generation setting that nothing can apply.
        UnsupportedModelError: the model was not loaded from a bundle with a KV plan, or cannot be batched like this.
    """

    @checked
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        kv_memory: int | None = None,
        max_batch: Count = 32,
        prompt_chunk: Count = 2048,
        max_batch_tokens: Count = 8192,
        max_waiting: Natural | None = None,
        prefix_caching: bool | None = None,
        keep_weights: bool = False,
        prompt_lookup_num_tokens: Any = None,
        assistant_model: Any = None,
    ):
        for name, value in (
            ("prompt_lookup_num_tokens", prompt_lookup_num_tokens),
            ("assistant_model", assistant_model),
        ):
            if value is not None:
                raise UsageError(
                    f"An Engine decodes one token of a request at a time and takes no `{name}`; leave it out, or call "
                    "`model.generate` with it."
                )
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise UsageError(
                f"`tokenizer` is of type {type(tokenizer).__name__}; give the one that `load` returns, or leave it out."
            )
        check_chunk(prompt_chunk, max_batch_tokens)
        self._tokenizer, self._prompt_chunk, self._max_batch_tokens = tokenizer, prompt_chunk, max_batch_tokens
        self._steps = ModelSteps(model, max_batch, kv_memory)
        stated = generation_settings(model.generation_config.to_dict(), model.config, tokenizer)
        self.generation = stated.without(_NOT_APPLIED if tokenizer else (*_NOT_APPLIED, "stop_strings"))
        if warning := self.generation.warning("The Engine"):
            logger.warning("%s", warning)
        check_settings(model, self.generation.values)
        self._recommended, self._stops = recommended(self.generation.values), self.generation.stops
        if keep_weights:
            self._steps.keep_weights()
        self._steps.prepare(prompt_chunk, max_batch_tokens)
        self._state_bytes = self._steps.state_bytes
        self._rows = RowState(max_batch, self._steps.device)
        self._scheduler = Scheduler(max_batch, self._steps.pages, max_waiting)
        # Of the scheduler, the requests' fields and the counts; never held for long.
        self._lock = lock = threading.Lock()
        self._stepping = threading.Lock()  # of the model and its cache
        self._work = threading.Condition(self._lock)
        self._cancelled: list[Request] = []  # what they hold is freed as soon as no pass is under way
        unsupported = no_prefixes(self._steps, prompt_chunk)
        if prefix_caching and unsupported is not None:
            raise UsageError(f"`prefix_caching` is not possible: {unsupported}.")
        keeps = prefix_caching is not False and unsupported is None
        self._prefixes = Prefixes(self._steps, self._scheduler, lock, prompt_chunk) if keeps else None
        self._unread: deque[UnreadStep] = deque()
        counted = ("prompt", "cached", "generated", "steps")
        self._counts = dict.fromkeys(("finished", "cancelled", "failed", "refused", *counted), 0)
        self._seconds = 0.0
        self._next_id = 0

    @checked
    def add(
        self,
        prompt: Annotated[Sequence[int] | Tensor, "the ids of its tokens"],
        *,
        max_new_tokens: Count | None = None,
        sampling: Sampling | None = None,
        stop_token_ids: Collection[int] | None = None,
        stop: Annotated[Collection[str], "a list of strings"] = (),
        constraint: LogitsProcessor | None = None,
        likeliest: Natural | None = None,
        special_tokens: bool = False,
        extras: Mapping[str, Tensor] | None = None,
        prefix_salt: bytes = b"",
        on_event: Callable[[Event], None] | None = None,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: token ids, a list or int64 [n] or [1, n].
            max_new_tokens: at most so many are generated; None takes what the model's generation_config.json says, or
                256, as far as there is room.
            sampling: how tokens are chosen; None takes what the model's generation_config.json says, which is greedy
                where it says nothing.
            stop_token_ids: tokens that end the request; None takes the model's end-of-sequence tokens, and the stop
                strings of its generation_config.json beside `stop`.
            stop: strings that end the request and are no part of its text.
            constraint: a processor of this request alone, called once for each token, before all settings, with the
                tokens so far, int64 [1, n], and the logits, float32 [1, V]; it says what may follow, such as a grammar,
                and must not raise.
            likeliest: report how likely each token was, and so many of the likeliest ones, 20 at most.
            special_tokens: whether special tokens leave text.
            extras: of a prompt with images: what the model's processor makes beside `input_ids` and `attention_mask`,
                such as `pixel_values`. The prompt is read by a pass of its own, of `max_batch_tokens` at most, and
                shares no prefix.
            prefix_salt: stored prefixes are shared among requests of the same salt alone.
            on_event: called by the thread that steps with each event of this request, the last one included; it should
                return at once, and must not step.

        Raises:
            UsageError: the request can never be served.
            QueueFullError: as many requests are waiting as may.
        """
        try:
            sampling = self._recommended if sampling is None else sampling
            if stop_token_ids is None:
                stop_token_ids = self._stops
                stop = [*stop, *self.generation.values.get("stop_strings", ())]
            elif wrong := [id for id in stop_token_ids if not 0 <= id < self._steps.vocabulary]:
                raise UsageError(
                    f"`stop_token_ids` has {wrong[0]}; the model's ids are 0 to {self._steps.vocabulary - 1}."
                )
            request = new_request(
                self._steps,
                self._tokenizer,
                prompt,
                max_new_tokens,
                self.generation,
                sampling,
                stop_token_ids,
                stop,
                constraint=constraint,
                likeliest=likeliest,
                special_tokens=special_tokens,
                extras=extras,
                most_tokens=self._max_batch_tokens,
            )
            request.on_event, request.on_cancel, request.prefix_salt = on_event, self._cancel, prefix_salt
            with self._lock:
                request.id, self._next_id = self._next_id, self._next_id + 1
                self._scheduler.enqueue(request)
                self._work.notify_all()
        except KvconvertError:
            with self._lock:
                self._counts["refused"] += 1
            raise
        return request

    @checked
    def room(self, prompt_tokens: Natural) -> int | None:
        """The largest `max_new_tokens` that `add` takes with a prompt of so many tokens; None without a limit.

        It is at most 0 where the prompt alone is too long.
        """
        return self._steps.room(prompt_tokens)

    def step(self) -> list[Event]:
        """Read chunks of prompts, decode one token of every running request, and return what came of it.

        On a GPU tokens are returned by the step after the one that has computed them.
        """
        try:
            with self._stepping:
                begun = time.perf_counter()
                try:
                    return self._step()
                finally:
                    with self._lock:
                        self._counts["steps"] += 1
                        self._seconds += time.perf_counter() - begun
        finally:
            self._free_cancelled()

    @checked
    def run(self, until: threading.Event | None = None, after_step: Callable[[], None] | None = None) -> None:
        """Step until all requests are finished; with `until`, serve until that event is set.

        Serving means waiting for further requests, and going on after a step that failed: the failure is logged, and
        the requests concerned have ended with "error". Without `until` it is raised. `after_step` is called after each
        step, when all its events were reported.
        """
        while True:
            with self._work:
                while until is not None and not until.is_set() and not self._busy():
                    self._work.wait(timeout=0.1)
                if (until is not None and until.is_set()) or not self._busy():
                    return
            try:
                self.step()
            except Exception as error:
                if until is None:
                    raise
                _log(error)
            finally:
                if after_step is not None:
                    after_step()

    @checked
    def stream(self, request: Request) -> Iterator[Event]:
        """A request's events as they come, stepping as needed; closing the iterator cancels the request.

        A step that fails is raised here if this request was in it, and logged if not.
        """
        tokens = text = 0
        try:
            while True:
                with self._lock:
                    reason = request.finish_reason
                    new, logprobs = tuple(request.tokens[tokens:]), tuple(request.logprobs[tokens:])
                    event = Event(request, new, request.text[text:], reason, logprobs)
                if event.tokens or event.text or reason:
                    tokens, text = tokens + len(event.tokens), text + len(event.text)
                    yield event
                if reason:
                    return
                try:
                    self.step()
                except Exception as error:
                    if request.finished:
                        raise
                    _log(error)
        finally:
            request.cancel()

    def stats(self) -> EngineStats:
        """What the engine is doing and has done."""
        with self._lock:
            counts, scheduler, prefixes = self._counts, self._scheduler, self._prefixes
            return EngineStats(
                waiting=len(scheduler.waiting),
                running=len(scheduler.prompts) + len(scheduler.running),
                **{name: counts[name] for name in ("finished", "cancelled", "failed", "refused", "steps")},
                pages_reserved=scheduler.pages_reserved + scheduler.pages_shared,
                pages_free=self._steps.cache.free_pages(),
                state_bytes=self._state_bytes,
                prefix_pages=prefixes.pages if prefixes else 0,
                prefixes_evicted=prefixes.evicted if prefixes else 0,
                prompt_tokens=counts["prompt"],
                generated_tokens=counts["generated"],
                cached_tokens=counts["cached"],
                seconds=self._seconds,
            )

    def _busy(self) -> bool:
        scheduler = self._scheduler
        return bool(scheduler.waiting or scheduler.prompts or scheduler.running or self._unread)

    def _step(self) -> list[Event]:
        self._admit()
        ready = self._resume() if self._prefixes else None
        with self._lock:
            reading = self._scheduler.next_chunks(self._prompt_chunk, self._max_batch_tokens, ready)
            running = dict(self._scheduler.running)
        events: list[Event] = []
        launched = bool(reading or running)
        if launched:
            try:
                if not reading:
                    running = self._gather(running)
                error = self._launch(running, reading)
            except BaseException:
                for request in (*running.values(), *(request for request, _ in reading)):
                    self._end(request, "error")
                raise
            if error is not None:
                raise error
        while len(self._unread) > (self._steps.lag if launched else 0):
            events += self._collect(self._unread.popleft())
        return events

    def _gather(self, running: dict[int, Request]) -> dict[int, Request]:
        """Move requests to lower rows where a pass over fewer rows has room for all of them, and return them by row."""
        if max(running) < (rows := self._steps.width(len(running))):
            return running
        with self._lock:  # no other request gets these rows meanwhile
            if moves := self._scheduler.gather(rows):
                self._steps.move(moves)
                self._rows.move(moves)
            return dict(self._scheduler.running)

    def _admit(self) -> None:
        """Give rows and pages to waiting requests; what these share with others of stored prefixes is needed once."""
        while True:
            with self._lock:
                self._scheduler.admit()
                oldest = next(iter(self._scheduler.waiting), None)
            if oldest is None or self._prefixes is None or not self._scheduler.free_rows:
                return
            self._prefixes.claim(oldest)
            with self._lock:
                if not self._scheduler.next_fits():
                    return

    def _resume(self) -> set[Request]:
        """Let prompts go on from stored prefixes; those that need not wait for one that another request is reading."""
        with self._lock:
            prompts = list(self._scheduler.prompts)
        ready = set()
        for request in prompts:
            before = request.cached_tokens
            if self._prefixes.resume(request):
                ready.add(request)
            with self._lock:
                self._counts["cached"] += request.cached_tokens - before
        self._prefixes.make_room()
        return ready

    def _launch(self, running: dict[int, Request], reading: list[tuple[Request, int]]) -> Exception | None:
        """One pass: a token of every running request, and the next tokens of prompts, so many of each.

        Returns:
            what a part of the cache failed with, whose requests have ended while the others go on; None if none has.
        """
        chunks: dict[PromptChunk, Request] = {}
        for request, count in reading:
            if request.prompt_cache is None:
                request.prompt_cache = self._steps.new_prompt()
            begin, end = request.prompt_read, request.prompt_read + count
            last = end == len(request.prompt)
            ids, inputs = request.prompt[begin:end], request.inputs
            chunks[PromptChunk(request.row, request.prompt_cache, ids, begin, last, inputs)] = request
            if last:
                self._rows.enter(request.row, request)
        self._rows.prepare(running)
        logits, failures = self._steps.forward(self._rows.ids, self._rows.positions, bool(running), list(chunks))
        chosen = self._rows.choose(logits)
        for part in failures:
            for request in running.values() if part is None else [chunks[part]]:
                self._end(request, "error")
        given, joined = {} if None in failures else dict(running), {}
        for chunk, request in chunks.items():
            if chunk in failures:
                continue
            request.prompt_read += len(chunk.ids)
            with self._lock:
                self._counts["prompt"] += len(chunk.ids)
            if self._prefixes:
                self._prefixes.read(request)
            if chunk.last:
                given[chunk.row], request.inputs = request, None
                # Others are known to be sound with the tokens of this pass, which nobody waits for here.
                if self._prefixes and request.max_new_tokens <= 1 + self._steps.lag:
                    self._prefixes.settle(request)
                if request.max_new_tokens > 1:
                    joined[request] = self._steps.join(chunk.row, chunk.cache)
                    request.prompt_cache = None
                    with self._lock:
                        self._scheduler.start(request)
        if given:
            logprobs = self._logprobs(logits, chosen, given)
            if not skips_launches():
                chosen = torch.where(has_numbers(logits), chosen, NO_TOKEN)
            self._unread.append(UnreadStep(self._steps.fetch(chosen), given, joined, logprobs))
        for request in given.values():
            request.launched += 1
            if request.launched == request.max_new_tokens:
                self._free(request)
        return next(iter(failures.values()), None)

    def _logprobs(
        self, logits: Tensor, chosen: Tensor, given: dict[int, Request]
    ) -> Callable[[], dict[int, list[float]]] | None:
        """Begin to fetch how likely the tokens were of those requests that ask for it."""
        asked = {row: request.likeliest for row, request in given.items() if request.likeliest is not None}
        if not asked:
            return None
        rows = upload([*asked], logits.device)
        fetched = self._steps.fetch(log_probabilities(logits[rows], chosen[rows], max(asked.values())))
        return lambda: dict(zip(asked, fetched(), strict=True))

    def _collect(self, unread: UnreadStep) -> list[Event]:
        """Read the tokens of a step and hand them out."""
        try:
            tokens, logprobs = unread.read(), unread.logprobs_of()
        except BaseException:
            # What a GPU computes fails when it is read, and with it what was launched after it.
            for request in {request for each in (unread, *self._unread) for request in each.rows.values()}:
                self._end(request, "error")
            raise
        events: list[Event] = []
        failed: KvconvertError | None = None
        lost = [request for row, request in unread.rows.items() if tokens[row] == NO_TOKEN]
        for request, raise_if_lost in unread.joined.items():
            if request.finished:
                continue
            try:
                raise_if_lost()
            except KvconvertError as error:
                failed = failed or error
                self._end(request, "error")
            else:
                if self._prefixes and request.max_new_tokens > 1 and request not in lost:
                    self._prefixes.settle(request)
        for request in lost:
            if not request.finished:
                failed = failed or NumericError(NO_NUMBERS)
                self._end(request, "error")
        with self._lock:
            for row, request in unread.rows.items():
                if not request.finished:
                    events.append(request.take(tokens[row], logprobs.get(request)))
        self._hand_out(events)
        if failed is not None:
            raise failed
        return events

    def _hand_out(self, events: list[Event]) -> None:
        """Count what came of a step, end the requests that are finished, and tell the listeners."""
        with self._lock:
            self._counts["generated"] += sum(len(event.tokens) for event in events)
        for event in events:
            if event.finish_reason:
                self._end(event.request, event.finish_reason, report=False)
        for event in events:
            _report(event)

    def _end(self, request: Request, reason: FinishReason, report: bool = True) -> None:
        """Finish a request and free what it holds; by the thread that has the cache."""
        with self._lock:
            if request.finished:
                return
            request.finish_reason = reason
            self._counts[{"cancelled": "cancelled", "error": "failed"}.get(reason, "finished")] += 1
        self._free(request)
        request.state = "finished"
        if report:
            _report(Event(request, (), "", reason))

    def _free(self, request: Request) -> None:
        """Give back a request's row and pages, once; by the thread that has the cache."""
        if self._prefixes:
            self._prefixes.leave(request)
        request.inputs = None
        if request.row is not None:
            self._rows.leave(request.row)
            if request.prompt_cache is not None:
                self._steps.discard(request.prompt_cache)
                request.prompt_cache = None
            elif request.state == "running":
                self._steps.leave(request.row)
        with self._lock:
            self._scheduler.release(request)

    def _cancel(self, request: Request) -> None:
        with self._lock:
            if request.finished:
                return
            if request.state == "waiting":  # its place is another's at once, what it holds when the pass is over
                self._scheduler.withdraw(request)
            self._cancelled.append(request)
        self._free_cancelled()

    def _free_cancelled(self) -> None:
        """End the cancelled requests, unless a pass is under way: it then does this when it is over."""
        while self._cancelled and self._stepping.acquire(blocking=False):
            try:
                while self._cancelled:
                    self._end(self._cancelled.pop(), "cancelled")
            finally:
                self._stepping.release()


def _log(error: Exception) -> None:
    """Log why a step failed; where it was raised, too, unless its message says what is wrong."""
    logger.error("%s (%s)", FAILED, error, exc_info=None if isinstance(error, KvconvertError) else error)


def _report(event: Event) -> None:
    """Call the request's listener; what it raises concerns no other request."""
    if event.request.on_event is not None:
        try:
            event.request.on_event(event)
        except Exception:
            logger.exception("on_event of request %d failed.", event.request.id)
