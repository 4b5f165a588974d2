"""Problems of a task, solved by a source and its bundle.

`problems` reads them and says how they are asked and checked. Both models answer in an Engine, the source with a cache
of 16 bits. Answers are generated freely, token by token, greedily and, with `seeds`, at the sampling that the model's
generation settings recommend. An Engine's noise follows from a request's seed alone, so that source and bundle draw
with the same: differences are the quantization's.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvconvert.bundle.locate import locate
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import UsageError, counted
from kvconvert.fidelity import source_of
from kvconvert.fidelity.evaluate import decoder_of, versions
from kvconvert.fidelity.retrieval import has_plain_template
from kvconvert.fidelity.scoring import Decoder, Work, bootstrap_mean, estimate_seconds, words
from kvconvert.fidelity.tasks.problems import TASKS, Problem, Task, text_before
from kvconvert.io.progress import loading_bars, progress_bar
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.models.configuration import layer_types_of, pages_unsupported
from kvconvert.models.devices import choose_device, compute_dtype
from kvconvert.models.processors import tokenizer_of
from kvconvert.models.prompts import Conversations, encode_text, token_ids
from kvconvert.models.source import open_source
from kvconvert.runtime import load
from kvconvert.runtime.engine import Engine, Sampling
from kvconvert.runtime.engine.sampling import recommended
from kvconvert.runtime.hf.generation import adopt
from kvconvert.tables import text_table

__all__ = ["TASKS", "TaskReport", "prompts_of", "solve"]


ROWS = {"cpu": 4, "cuda": 128}  # of an Engine
EXACT = KVScheme(key_bits=16, value_bits=16)


@dataclass(frozen=True)
class TaskAnswer:
    """One answer to one problem.

    Attributes:
        problem: its name.
        seed: the seed of the sampling; None is greedy.
        right: whether it passes.
        tokens: how many were generated.
        cut_off: whether it ended for want of tokens.
        text: what was generated.
    """

    problem: str
    seed: int | None
    right: bool
    tokens: int
    cut_off: bool
    text: str


@dataclass(frozen=True)
class TaskComparison:
    """The answers of source and bundle to all problems, greedy ones or sampled ones.

    Attributes:
        source, bundle: share of right answers.
        change: `bundle` less `source`, with a 95% bootstrap interval over problems (None with a single one).
        source_tokens, bundle_tokens: mean length of answers.
        source_cut_off, bundle_cut_off: share of answers that ended for want of tokens.
        agreement: mean number of tokens until the two answers differ, the answer's length where they never do.
        identical: share of answers that never differ.
    """

    source: float
    bundle: float
    change: float
    change_interval: tuple[float, float] | None
    source_tokens: float
    bundle_tokens: float
    source_cut_off: float
    bundle_cut_off: float
    agreement: float
    identical: float


@dataclass(frozen=True)
class TaskReport:
    """A task, solved by a source and its bundle.

    Attributes:
        task: its name.
        problems: how many.
        context: tokens before each problem, at most.
        seeds: answers to each problem beside the greedy one.
        greedy, sampled: see `Comparison`; `sampled` is None without seeds.
        answers: by "source" and "bundle", all of them.
        sampling: temperature, top_k and top_p of sampled answers.
        against, compute_dtype, device, seed, versions: how it was measured.
    """

    task: str
    problems: int
    context: int
    seeds: int
    greedy: TaskComparison
    sampled: TaskComparison | None
    answers: dict[str, list[TaskAnswer]]
    sampling: dict[str, float] | None
    against: str
    compute_dtype: str
    device: str
    seed: int
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return asdict(self)

    def table(self) -> str:
        """A few rows for greedy answers, and for sampled ones."""
        rows = []
        for how, found in (("greedy", self.greedy), (f"{self.seeds} seeds", self.sampled)):
            if found is None:
                continue
            interval = found.change_interval
            low, high = (0.0, 0.0) if interval is None else interval
            spread = "" if interval is None else f" ({100 * low:+.1f} to {100 * high:+.1f})"
            change = f"{100 * found.change:+.1f} points{spread}"
            rows += [
                (f"{self.task}, {how}", f"{found.source:.1%}", f"{found.bundle:.1%}", change),
                ("tokens of an answer", f"{found.source_tokens:.1f}", f"{found.bundle_tokens:.1f}", ""),
                ("answers cut off", f"{found.source_cut_off:.1%}", f"{found.bundle_cut_off:.1%}", ""),
                (
                    "tokens until answers differ",
                    "",
                    f"{found.agreement:.1f}",
                    f"{found.identical:.1%} of answers are identical",
                ),
            ]
        before = f"{counted(self.context, 'token')} before each" if self.context else "nothing before them"
        asked = counted(self.problems, "problem")
        said = f"{asked}, {before}, computed in {self.compute_dtype} on {self.device} against {self.against}"
        return "\n".join([text_table(("", "source", "bundle", ""), rows), "", said])


def solve(
    bundle: str | Path,
    task: str,
    against: str | Path | None = None,
    *,
    data: str | None = None,
    limit: int | None = None,
    context: int = 0,
    seeds: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> TaskReport:
    """Let a source and its bundle solve the problems of a task.

    Args:
        bundle: directory of the bundle, or its id on the Hub.
        task: a name in `TASKS`.
        against: directory or Hub id of the source; None takes the id that the manifest records.
        data: file of the problems, for tasks that read one.
        limit: problems, evenly spaced among all; None takes all.
        context: tokens before each problem at most, which the cache quantizes: files of a repository, or other problems
            with their answers.
        seeds: sampled answers to each problem, beside a greedy one.
        device, dtype: as for `evaluate`.
        seed: the seed of what stands before problems, of sampling and of the bootstrap.
        progress: bars on stderr.

    Raises:
        UsageError: an unknown task, problems that cannot be read, prompts that are too long, a model that recommends no
            sampling and is asked for seeds.
        BundleError, CheckpointError, DataError, UnsupportedModelError: as their names say.
    """
    if task not in TASKS:
        raise UsageError(f"There is no task {task!r}; choose among {', '.join(TASKS)}.")
    asked = TASKS[task]
    every = asked.problems(data)
    count = len(every) if limit is None else min(limit, len(every))
    problems = [every[i * len(every) // count] for i in range(count)]
    place = choose_device(device)
    opened = open_bundle(locate(bundle))
    against_id = source_of(opened.manifest, against)
    checkpoint = open_source(against_id, was_fetched=against is None and opened.manifest.source.revision is not None)
    computed_in = compute_dtype(dtype, place, checkpoint.config.dtype)

    with loading_bars(progress):
        model, processor = load(opened.directory, dtype=computed_in, verify="headers")
    opened.files.check_unchanged()
    tokenizer = tokenizer_of(processor)
    prompts, stops = prompts_of(asked, every, problems, tokenizer, context, seed)
    engine = _engine(model.to(place).eval(), tokenizer, place)
    samplings = _samplings(engine, seeds, seed, checkpoint.id)
    _say_time(decoder_of(model), prompts, len(samplings), asked.answer_tokens, "bundle", progress)
    bundled = _answers(engine, prompts, asked.answer_tokens, stops, samplings, "bundle", progress)
    del model, engine
    gc.collect()
    with loading_bars(progress):
        source = checkpoint.load(computed_in).to(place).eval()
    _say_time(Decoder.plain(source), prompts, len(samplings), asked.answer_tokens, "source", progress)
    adopt(source, _exact_schemes(source), {})
    engine = _engine(source, tokenizer, place)
    exact = _answers(engine, prompts, asked.answer_tokens, stops, samplings, "source", progress)

    checked = {
        name: asked.check([p for p in problems for _ in samplings], [text for _, text, _ in found], progress)
        for name, found in (("source", exact), ("bundle", bundled))
    }
    sampled = [i for i in range(len(exact)) if not samplings[i % len(samplings)].greedy]
    greedy = [i for i in range(len(exact)) if i not in set(sampled)]
    answers = {
        name: [
            TaskAnswer(
                problems[i // len(samplings)].name,
                samplings[i % len(samplings)].seed,
                right,
                len(tokens),
                reason == "length",
                text,
            )
            for i, (right, (tokens, text, reason)) in enumerate(zip(checked[name], found, strict=True))
        ]
        for name, found in (("source", exact), ("bundle", bundled))
    }
    differ = [_agreement(a, b) for (a, *_), (b, *_) in zip(exact, bundled, strict=True)]
    drawn = samplings[-1]
    return TaskReport(
        task=task,
        problems=count,
        context=context,
        seeds=seeds,
        greedy=_compare(answers, differ, greedy, count, seed),
        sampled=_compare(answers, differ, sampled, count, seed) if sampled else None,
        answers=answers,
        sampling=None
        if drawn.greedy
        else {"temperature": drawn.temperature, "top_k": drawn.top_k, "top_p": drawn.top_p},
        against=checkpoint.id,
        compute_dtype=str(computed_in).removeprefix("torch."),
        device=place.type,
        seed=seed,
        versions=versions(),
    )


def prompts_of(
    task: Task,
    every: Sequence[Problem],
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    seed: int,
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Token ids of each problem's prompt, and the strings that end an answer.

    Args:
        task: whose problems they are.
        every: all its problems, among which those of the context are chosen.
        problems: those that are asked.
        tokenizer: the model's.
        tokens: maximum number of context tokens before each problem.
        seed: the seed of that choice.
    """
    templated = has_plain_template(tokenizer)
    conversations = Conversations(tokenizer)

    def encode(text: str) -> list[int]:
        return token_ids(tokenizer, text)

    def prompt(problem: Problem) -> list[int]:
        before = ""
        if tokens:
            pieces = task.pieces(every, problem, random.Random(f"{seed} {problem.name}"))
            before = text_before(pieces, tokens, task.divisible, encode, tokenizer.decode)
        if not templated:
            return encode_text(tokenizer, before + problem.plain)
        said = f"{before}\n{problem.request}" if before else problem.request
        return conversations.ids(conversations.text([{"role": "user", "content": said}], answer=True) + problem.opening)

    return [prompt(problem) for problem in problems], task.stops[0 if templated else 1]


def _engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Engine:
    return Engine(model, tokenizer, max_batch=ROWS[device.type])


def _exact_schemes(model: PreTrainedModel) -> list[KVScheme | None]:
    """A cache of 16 bits, in the layers that can have one of pages."""
    config = model.config.get_text_config(decoder=True)
    return [None if pages_unsupported(config, kind, EXACT) else EXACT for kind in layer_types_of(config)[0]]


def _samplings(engine: Engine, seeds: int, seed: int, name: str) -> list[Sampling]:
    """Greedy, without the penalties that a model may recommend; and as it recommends, by each seed."""
    own = recommended(engine.generation.values)
    if seeds and own.greedy:
        raise UsageError(f"`seeds`: {name} recommends no sampling in its generation_config.json; leave them out.")
    return [Sampling(), *(replace(own, seed=seed + number) for number in range(seeds))]


def _say_time(
    decoder: Decoder, prompts: Sequence[list[int]], samplings: int, new_tokens: int, name: str, progress: bool
) -> None:
    """Say on stderr how long answers take at most, of which most end early."""
    if progress:
        page = torch.tensor([(prompts[0] * PAGE_SIZE)[:PAGE_SIZE]])
        rows = len(prompts) * samplings
        work = Work(rows, round(statistics.fmean(map(len, prompts))), new_tokens, ROWS[decoder.model.device.type])
        seconds = words(estimate_seconds([decoder], page, [work]))
        said = f"{counted(rows, 'answer')} of up to {new_tokens:,} tokens by the {name}: at most {seconds}."
        print(said, file=sys.stderr, flush=True)


def _answers(
    engine: Engine,
    prompts: Sequence[list[int]],
    new_tokens: int,
    stops: Sequence[str],
    samplings: Sequence[Sampling],
    name: str,
    progress: bool,
) -> list[tuple[list[int], str, str]]:
    """Tokens, text, and why each answer ended; for every prompt one of each sampling."""
    longest = max(map(len, prompts))
    room = engine.room(longest)
    if room is not None and room < new_tokens:
        raise UsageError(
            f"A prompt of {counted(longest, 'token')} leaves {max(0, room)} of the {new_tokens} that an "
            "answer may have; choose a "
            "smaller `context`."
        )
    total = len(prompts) * len(samplings)
    with progress_bar(total=total, desc=f"answers, {name}", unit="answer", shown=progress) as bar:
        requests = [
            engine.add(
                prompt,
                max_new_tokens=new_tokens,
                sampling=sampling,
                stop=stops,
                on_event=lambda event: bar.update(event.finish_reason is not None),
            )
            for prompt in prompts
            for sampling in samplings
        ]
        engine.run()
    return [(list(request.tokens), request.text, str(request.finish_reason)) for request in requests]


def _agreement(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Tokens before two answers differ; None where they never do."""
    same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if same is None and len(first) != len(second):
        same = min(len(first), len(second))
    return same


def _compare(
    answers: dict[str, list[TaskAnswer]], differ: Sequence[int | None], chosen: Sequence[int], problems: int, seed: int
) -> TaskComparison:
    """The answers of these numbers, as many of each problem."""
    source, bundle = ([answers[name][i] for i in chosen] for name in ("source", "bundle"))
    right = [torch.tensor([float(answer.right) for answer in found]).view(problems, -1) for found in (source, bundle)]
    change = bootstrap_mean((right[1] - right[0]).mean(1), seed)
    until = [source[n].tokens if differ[i] is None else differ[i] for n, i in enumerate(chosen)]

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    return TaskComparison(
        source=float(right[0].mean()),
        bundle=float(right[1].mean()),
        change=change.mean,
        change_interval=change.bounds,
        source_tokens=mean([answer.tokens for answer in source]),
        bundle_tokens=mean([answer.tokens for answer in bundle]),
        source_cut_off=mean([answer.cut_off for answer in source]),
        bundle_cut_off=mean([answer.cut_off for answer in bundle]),
        agreement=mean(until),
        identical=mean([differ[i] is None for i in chosen]),
    )
