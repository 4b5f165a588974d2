"""Tasks of lm-evaluation-harness, answered by a bundle through its low-bit cache.

Prompts of likelihoods are read page by page through the cache, so that a continuation is judged from what the cache
made of its context; contexts within a page, and the page that is being filled, are in full precision, as they are when
a bundle serves. Generation is `model.generate`, greedy. Needs the package lm-eval (`pip install ".[harness]"`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconvert.errors import MissingError, UsageError, first_line

try:  # before torch, whose import takes seconds
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise MissingError(
        f"Tasks of lm-evaluation-harness need the package lm-eval ({error}); run pip install '.[harness]' in a clone "
        "of kvconvert."
    ) from error

import torch
from transformers import PreTrainedTokenizerBase

from kvconvert.bundle.locate import locate
from kvconvert.bundle.reader import open_bundle
from kvconvert.fidelity import check_tasks, no_such_task
from kvconvert.fidelity.evaluate import decoder_of
from kvconvert.fidelity.scoring import Decoder, batches, feed, read_prompt
from kvconvert.io.progress import loading_bars, progress_bar
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.models.configuration import context_length, read_config
from kvconvert.models.devices import choose_device, compute_dtype
from kvconvert.models.processors import tokenizer_of
from kvconvert.models.prompts import Conversations, encode_text, token_ids
from kvconvert.models.source import open_source
from kvconvert.runtime import load
from kvconvert.tables import text_table

# It names the commit of whatever directory it runs in, and git complains where there is none.
evaluator.get_git_commit_hash = lambda: None

MAX_NEW_TOKENS = 256  # of a task that does not say
# What a task may say of generation; sampling is refused, for a bundle is compared greedily.
GREEDY = {"do_sample": False, "temperature": 0.0, "num_beams": 1, "top_p": 1.0, "top_k": 50}
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class HarnessReport:
    """Metrics of each task.

    Attributes:
        bundle, source: by task, then by metric as the harness names it ("acc,none"); `source` is None where none was
            measured.
        examples: measured of each task.
        compute_dtype, device: how.
    """

    bundle: dict[str, dict[str, Any]]
    source: dict[str, dict[str, Any]] | None
    examples: dict[str, int]
    compute_dtype: str
    device: str

    def to_dict(self) -> dict[str, Any]:
        """All metrics as plain JSON values."""
        return json.loads(json.dumps(vars(self), default=str))

    def table(self) -> str:
        """One row for each metric."""
        rows = []
        for task, metrics in self.bundle.items():
            for name, value in metrics.items():
                label, comma, filtered = name.partition(",")
                if not comma or not isinstance(value, float | int) or label.endswith("_stderr"):
                    continue
                error = metrics.get(f"{label}_stderr,{filtered}")
                spread = f"+- {error:.4f}" if isinstance(error, float) else ""
                before = "" if self.source is None else f"{self.source[task][name]:.4f}"
                rows.append(
                    (task, name.removesuffix(",none"), before, f"{value:.4f}", spread, str(self.examples[task]))
                )
        return text_table(("task", "metric", "source", "bundle", "", "examples"), rows)


def harness(
    bundle: str | Path,
    tasks: Sequence[str],
    against: str | Path | None = None,
    *,
    limit: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    batch: int = 4,
    progress: bool = True,
) -> HarnessReport:
    """Measure a bundle on tasks of lm-evaluation-harness.

    Args:
        bundle: directory of the bundle, or its id on the Hub.
        tasks: names of tasks or groups of the harness, or paths of task files (.yaml).
        against: directory or Hub id of a source to be measured in the same way; None measures the bundle alone.
        limit: examples of each task; None takes all.
        device, dtype: as for `evaluate`.
        batch: sequences at a time.
        progress: bars on stderr.

    Raises:
        UsageError: no task or an unknown one is named, or a request is not served.
        MissingError: a task's file or data, or lm-eval, is missing or cannot be used.
        BundleError, CheckpointError: as their names say.
    """
    files = check_tasks(tasks)
    manager = TaskManager(include_defaults=len(files) < len(tasks))
    for task in tasks:
        if task not in files and not manager.match_tasks([task]):
            raise no_such_task(task)
    place = choose_device(device)
    directory = locate(bundle)
    for task in tasks:
        try:  # before a model is loaded; the harness finds the data here again
            manager.load([task])
        except Exception as error:  # of as many kinds as there are fields in a task's file
            raise _not_loaded(task, error) from error
    opened = open_bundle(directory)
    checkpoint = None if against is None else open_source(str(against))
    # Older models' config.json says torch_dtype, which transformers reads as dtype.
    config = read_config(opened.directory, opened.config)
    computed_in = compute_dtype(dtype, place, config.dtype)
    with loading_bars(progress):
        model, processor = load(directory, dtype=computed_in, verify="headers")
    opened.files.check_unchanged()
    tokenizer = tokenizer_of(processor)

    def measure(decoder: Decoder, name: str) -> dict[str, Any]:
        lm = CachedLM(decoder, tokenizer, batch, progress, name)
        return simple_evaluate(
            lm, tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=1000
        )

    found = measure(decoder_of(model.to(place).eval()), "bundle")
    del model
    source = None
    if checkpoint is not None:
        with loading_bars(progress):
            plain = checkpoint.load(computed_in)
        source = measure(Decoder.plain(plain.to(place).eval()), "source")["results"]
    return HarnessReport(
        bundle=found["results"],
        source=source,
        examples={name: counts["effective"] for name, counts in found["n-samples"].items()},
        compute_dtype=str(computed_in).removeprefix("torch."),
        device=place.type,
    )


def _not_loaded(task: str, error: Exception) -> MissingError:
    """The error for a task of which the harness cannot load the data, or which it does not understand."""
    reason = first_line(" ".join(str(error).split())).rstrip(".")
    if isinstance(error, OSError) and error.filename is None:  # of datasets
        return MissingError(
            f"lm-evaluation-harness cannot load the data of {task} ({reason}); connect to the Hub, or name tasks whose "
            "data are on this machine."
        )
    return MissingError(
        f"lm-evaluation-harness cannot use the task {task} ({type(error).__name__}: {reason}); correct its file, "
        "install what it needs, or name another."
    )


class CachedLM(TemplateLM):
    """The harness's view of a model that decodes with a cache.

    Args:
        decoder: model and cache.
        tokenizer: the model's tokenizer.
        batch: sequences at a time.
        progress: bars on stderr.
        name: the model's name in progress bars.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase, batch: int, progress: bool, name: str = "bundle"
    ):
        super().__init__()
        self.decoder, self.tokenizer, self.batch, self.progress = decoder, tokenizer, batch, progress
        self.name = name
        self.max_length: int = context_length(decoder.model.config) or 2048

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without context begins with."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        """For the harness's caches of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; by default with what the tokenizer puts before a text, unless it is there."""
        if add_special_tokens is False:
            return token_ids(self.tokenizer, string)
        return encode_text(self.tokenizer, string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text."""
        conversations = Conversations(self.tokenizer, parse_special=True)
        return conversations.text(chat_history, add_generation_prompt, continue_final_message=not add_generation_prompt)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each in windows of the model's positions."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += score
        return totals

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether it is the greedy one."""
        prompts = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UsageError(
                    f"A continuation of {len(continuation):,} tokens is longer than the model's {self.max_length:,} "
                    "positions; choose another task."
                )
            prompts.append((context[-(self.max_length + 1 - len(continuation)) :], continuation))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(prompts)
        shown = self.progress and not disable_tqdm
        with progress_bar(total=len(prompts), desc=f"likelihoods, {self.name}", unit="prompt", shown=shown) as bar:
            for indices in batches(prompts, self.batch):
                context, continuation = (torch.tensor([prompts[i][part] for i in indices]) for part in (0, 1))
                for index, answer in zip(indices, self._score(context, continuation), strict=True):
                    found[index] = answer
                bar.update(len(indices))
        return found

    def _score(self, context: torch.Tensor, continuation: torch.Tensor) -> list[tuple[float, bool]]:
        """Log-likelihoods of int64 [B, m] after [B, n], both read through a cache."""
        cache = self.decoder.new_cache()
        if context.shape[1] > 1:
            read_prompt(self.decoder, cache, context[:, :-1])
        inputs = torch.cat([context[:, -1:], continuation[:, :-1]], 1)
        total = torch.zeros(len(inputs), dtype=torch.float64)
        greedy = torch.ones(len(inputs), dtype=torch.bool)
        for start in range(0, inputs.shape[1], PAGE_SIZE):
            part = slice(start, start + PAGE_SIZE)
            scores = feed(self.decoder, cache, inputs[:, part]).logits.float().log_softmax(-1)
            targets = continuation[:, part].to(scores.device)
            total += scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1).double().sum(1).cpu()
            greedy &= (scores.argmax(-1) == targets).all(1).cpu()
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    @torch.no_grad()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to one of a task's stop strings.

        Raises:
            UsageError: a task asks for sampling, beams, or anything else that is not greedy.
        """
        texts = []
        model = self.decoder.model
        shown = self.progress and not disable_tqdm
        for request in progress_bar(requests, desc="generation", unit="prompt", shown=shown):
            prompt, options = request.args[0], dict(request.args[1])
            until = options.pop("until", None) or []
            until = [until] if isinstance(until, str) else list(until)
            asked = [options.pop(name) for name in LENGTHS if name in options]
            count = int(asked[0]) if asked else MAX_NEW_TOKENS
            _check_greedy(options)
            ids = self.tok_encode(prompt)[-(self.max_length - count) :] if count < self.max_length else []
            if not ids:
                raise UsageError(
                    f"A task wants {count:,} new tokens, and the model has {self.max_length:,} positions; choose "
                    "another."
                )
            inputs = torch.tensor([ids], device=model.device)
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=self.eot_token_id,
                **({"stop_strings": until, "tokenizer": self.tokenizer} if until else {}),
            )
            text = self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
            texts.append(text[: min((text.find(stop) for stop in until if stop in text), default=len(text))])
        return texts


def _check_greedy(options: dict[str, Any]) -> None:
    sampling = options.get("do_sample", False) and options.get("temperature", 1.0) != 0
    for name, value in options.items():
        if name not in GREEDY:
            raise UsageError(f"A task asks for {name} = {value!r} in generation, which is not served; choose another.")
        if (name == "do_sample" and sampling) or (name == "num_beams" and value != 1):
            raise UsageError(f"A task asks for {name} = {value!r}; bundles are measured with greedy generation alone.")
