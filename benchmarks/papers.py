"""The papers' own tables on real models: every method to its paper's letter and as it is here, and every part apart.

    python benchmarks/papers.py MODEL... --text DIR [--tables NAME ...]

DIR holds wikitext2-test.txt; the second text is code, the standard library of the Python that runs this. Caches are
calibrated on novels that ship with kvconvert, and weights stay as they are but for the table of AWQ. Pages are scored
as decoding reads them, from token 160 of each segment on; what compresses whole prompts after a sealed prompt. All
models compute in float32. Results go to benchmarks/results/papers_MODEL.json row by row, and rows that are there,
measured in the same way, are kept; `make docs` then writes the tables into benchmarks/PAPERS.md.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import papers_weights
import torch
from papers_docs import laboratory, reports
from runner import RESULTS, ROOT, option_parser, read, save
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, attention_arguments, attention_observed
from kvconvert.convert.pipeline import calibrate
from kvconvert.data.text import spaced_samples
from kvconvert.fidelity.evaluate import versions
from kvconvert.fidelity.scoring import Comparison, Decoder, compare
from kvconvert.kernels import pages
from kvconvert.kernels.pages import PAGE_SIZE, reference
from kvconvert.kernels.select import column_sums, select_tokens
from kvconvert.methods import KVScheme
from kvconvert.methods.auto import DEFAULT_CONTEXT
from kvconvert.models.configuration import head_dim, key_value_heads, model_cache
from kvconvert.recipes.recipe import Recipe
from kvconvert.runtime import KVCache
from kvconvert.runtime.cache import compress

TEXTS = ("wikitext2-test", "python")
FIRST_SCORED = 160  # beyond every preset's sink tokens and their first page
PROMPT = 1024  # tokens of a sealed prompt: with MiniKV's half of it, what is kept fills whole pages
GROUP = 3  # cases that are scored beside one source
SHARES = (0.05, 0.1, 0.25, 0.45)  # of a prompt, as heavy hitters


@dataclass(frozen=True)
class Case:
    """A preset with changes.

    Attributes:
        preset: its name; fields: over its own.
        sealed: read a prompt in one pass first, whatever the method.
        simulated: what no scheme says: "maximum" (token norms) or "random" (boosted channels).
    """

    preset: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    sealed: bool = False
    simulated: str = ""

    @property
    def key(self) -> str:
        """Its name in the results."""
        changes = ",".join(f"{name}={value}" for name, value in self.fields.items())
        parts = (
            self.preset,
            changes and f":{changes}",
            " sealed" * self.sealed,
            self.simulated and f" {self.simulated}",
        )
        return "".join(filter(None, parts))

    def recipe(self) -> Recipe:
        """What `calibrate` is given."""
        return Recipe.load(self.preset, {"weights.method": "none"} | {f"kv.{k}": v for k, v in self.fields.items()})

    def calibrates(self) -> bool:
        """Whether calibration chooses anything; random channels take the place of what it would."""
        recipe = self.recipe()
        chosen = recipe.calibration.searched(recipe.kv) or recipe.kv.needs_calibration()
        return bool(chosen) and not self.simulated

    def seals(self) -> bool:
        """Whether it is scored after a sealed prompt."""
        return self.sealed or self.recipe().kv.compresses_prompts()


@dataclass(frozen=True)
class Row:
    """One line of a table: what it says, what it measures, and the line that it is compared with."""

    label: str
    case: Case | papers_weights.Case
    against: str = ""


def _methods(names: Sequence[str], paper: str) -> tuple[Row, ...]:
    return tuple(
        row
        for name in names
        for row in (Row(f"{name}-{paper}", Case(f"{name}-{paper}")), Row(name, Case(name), f"{name}-{paper}"))
    )


def _kitty(label: str, fraction: float, against: str = "", **changes: Any) -> Row:
    random = changes.get("boost_select") == "calibrated"
    fields = {"boost_fraction": fraction} | changes
    return Row(label, Case("kitty-paper", fields, simulated="random" if random else ""), against)


def _budget(heavy: float, recent: float) -> Row:
    base = (heavy, recent) == (0.25, 0.25)
    fields = _EXACT if base else _EXACT | {"heavy_ratio": heavy, "recent_ratio": recent}
    return Row(f"{heavy:.0%} + {recent:.0%}", Case("minikv-plain", fields), "" if base else "25% + 25%")


# Eviction alone: what is kept is not quantized, as in the paper's figures.
_EXACT = {"key_bits": 16, "value_bits": 16}
_PLAIN = {"rotate_keys": "none", "rotate_values": "none"}
_RANDOM = {"boost_select": "calibrated"}
_OSCAR = "oscar-g128-paper"
TABLES: dict[str, tuple[Row, ...]] = {
    "pages": (
        *_methods(("kivi", "oscar", "oscar-g128", "kitty", "kitty-pro"), "paper"),
        Row("default", Case("default"), "oscar"),
    ),
    "prompts": (
        Row(_OSCAR, Case(_OSCAR, sealed=True)),
        Row("oscar-g128", Case("oscar-g128", sealed=True), _OSCAR),
        *_methods(("minikv", "minikv-pyramid"), "plain"),
        *_methods(("calibquant-2bit", "calibquant-1bit"), "paper"),
    ),
    "oscar": (
        Row("neither", Case(_OSCAR, _PLAIN | {"token_norm": "none"})),
        Row("norms alone", Case(_OSCAR, _PLAIN), "neither"),
        Row("rotation alone", Case(_OSCAR, {"token_norm": "none"}), "neither"),
        Row("both, l2", Case(_OSCAR), "rotation alone"),
        Row("both, mean_abs", Case(_OSCAR, {"token_norm_measure": "mean_abs"}), "both, l2"),
        Row("both, maximum", Case(_OSCAR, simulated="maximum"), "both, l2"),
    ),
    "kitty": (
        _kitty("0%", 0.0),
        Row("12.5%", Case("kitty-paper"), "0%"),
        Row("25%", Case("kitty-pro-paper"), "12.5%"),
        _kitty("50%", 0.5, "25%"),
        _kitty("100%", 1.0, "50%"),
        _kitty("12.5%, random", 0.125, "12.5%", **_RANDOM),
        _kitty("25%, random", 0.25, "25%", **_RANDOM),
        _kitty("50%, random", 0.5, "50%", **_RANDOM),
    ),
    "budgets": tuple(
        _budget(*shares)
        for shares in ((0.25, 0.25), (0, 0.5), (0.1, 0.4), (0.4, 0.1), (0.5, 0), (0.05, 0.1), (0.1, 0.1), (0.45, 0.45))
    ),
    "allocation": (
        Row("uniform", Case("minikv-plain", _EXACT)),
        *(
            Row(name, Case("minikv-plain", _EXACT | {"allocation": name}), "uniform")
            for name in ("pyramid", "calibrated")
        ),
    ),
    "weights": (
        Row("rounding", papers_weights.Case("rtn")),
        *(
            Row(f"{share:.1%} kept, by {by}", papers_weights.Case("keep", share, by), "rounding")
            for share, by in ((0.001, "activation"), (0.01, "activation"), (0.03, "activation"))
        ),
        *(
            Row(f"1.0% kept, by {by}", papers_weights.Case("keep", 0.01, by), "1.0% kept, by activation")
            for by in ("weight", "chance")
        ),
        *(
            Row(f"1.0% times {scale}", papers_weights.Case("scale", 0.01, "activation", scale), "rounding")
            for scale in (1.25, 1.5, 2.0, 4.0)
        ),
        Row("AWQ", papers_weights.Case("awq"), "rounding"),
    ),
}


def code() -> str:
    """The modules of the standard library that are one file, by name."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@lru_cache(maxsize=1)
def segments_of(model: Path, args: tuple[Path, Path, int, int]) -> Tensor:
    """Both texts' segments, WikiText-2's first: int64 [2 segments, length]."""
    text, work, segments, length = args
    tokenizer = AutoTokenizer.from_pretrained(model)
    files = [str(text / f"{TEXTS[0]}.txt"), str(work / "python.txt")]
    return torch.cat([spaced_samples(file, tokenizer, segments, length) for file in files])


def texts(args: argparse.Namespace, model: Path) -> Tensor:
    return segments_of(model, (args.text, args.work, args.segments, args.length))


@lru_cache(maxsize=1)
def load_model(directory: Path, device: str, attention: str) -> PreTrainedModel:
    found = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
    return found.to(device).eval()


def calibrated(args: argparse.Namespace, model: Path, case: Case) -> Any:
    """The finished working directory of a case."""
    folder = args.work / f"{model.name}-{args.samples}-{args.device}" / case.recipe().name.replace(" ", "_")
    folder.parent.mkdir(parents=True, exist_ok=True)
    options = {"samples": args.samples, "seq_len": 512, "device": args.device, "progress": False}
    return calibrate(model, folder, recipe=case.recipe(), **options)


def random_channels(scheme: KVScheme, config: Any) -> dict[str, Tensor]:
    """The plan of a cache that boosts channels drawn by chance."""
    size, heads = head_dim(config.get_text_config()), key_value_heads(config.get_text_config())
    generator, found = torch.Generator().manual_seed(0), {}
    for layer in range(config.get_text_config().num_hidden_layers):
        drawn = torch.rand(heads, size, generator=generator).argsort(1)[:, : scheme.boosted_for(size)]
        found[f"layers.{layer}.boosted_channels"] = drawn.sort(1).values.to(torch.int32)
    return found


@contextmanager
def norms_by_the_maximum() -> Iterator[None]:
    """Token norms that are the largest magnitude (OScaR, table 10): no scheme has them, so pages are quantized by the
    reference instead of kernels.
    """

    def largest(keys: Tensor, scope: str, measure: str) -> Tensor:
        return keys.float().abs().amax((1, 3)).unsqueeze(1)

    with ExitStack() as stack:
        stack.enter_context(patch.object(reference, "token_norms", largest))
        for module in (pages, compress):
            stack.enter_context(patch.object(module, "unsupported", lambda *_: "norms by the maximum are simulated"))
        yield


def decoder_of(args: argparse.Namespace, model: Path, case: Case) -> tuple[Decoder, float]:
    """The model with a case's cache, and its bits per value at `DEFAULT_CONTEXT` tokens."""
    source, scheme, plan = load_model(model, args.device, "kvconvert"), case.recipe().kv, {}
    config = source.config.get_text_config()
    schemes: list[KVScheme | None] = [scheme.with_online_rotation()] * config.num_hidden_layers
    if case.simulated == "random":
        plan = random_channels(scheme, source.config)
    elif case.calibrates():
        store = calibrated(args, model, case)
        layers = range(store.state.num_layers)
        plan = {name: tensor for layer in layers for name, tensor in store.layer_plan(layer).items()}
        found = [store.layer_record(layer).scheme for layer in layers]
        schemes = [s if s is None else KVScheme.from_dict(s).with_online_rotation() for s in found]
    bits = model_cache(source.config, schemes).bits_per_value(DEFAULT_CONTEXT)
    return Decoder(source, lambda: KVCache(source.config, schemes, plan=plan)), bits


@torch.no_grad()
def measure_caches(args: argparse.Namespace, model: Path, cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Figures of cases, sealed all or none."""
    source = Decoder.plain(load_model(model, args.device, "kvconvert"))
    decoders = {case.key: decoder_of(args, model, case) for case in cases}
    prefill = PROMPT if cases[0].seals() else PAGE_SIZE
    with norms_by_the_maximum() if cases[0].simulated == "maximum" else ExitStack():
        others = {key: decoder for key, (decoder, _) in decoders.items()}
        found = compare(source, others, texts(args, model), prefill, batch=args.batch)
    return {
        key: {"bits": decoders[key][1], "sealed": prefill == PROMPT} | figures(found[key], FIRST_SCORED - prefill)
        for key in decoders
    }


def figures(found: Comparison, skipped: int) -> dict[str, Any]:
    """Per text and segment, without the first scored tokens."""
    parts = [part[:, max(0, skipped) :].mean(1).tolist() for part in (found.kl, found.other_nll, found.source_nll)]
    count = len(parts[0]) // len(TEXTS)
    return {
        "texts": {
            name: dict(zip(("kl", "nll", "source_nll"), (p[i * count : (i + 1) * count] for p in parts), strict=True))
            for i, name in enumerate(TEXTS)
        }
    }


@torch.no_grad()
def measure_weights(args: argparse.Namespace, model: Path, cases: Sequence[papers_weights.Case]) -> dict[str, Any]:
    """Figures of models with quantized weights and their own caches."""
    source = Decoder.plain(load_model(model, args.device, "kvconvert"))
    rows = {}
    for case in cases:
        quantized = Decoder.plain(papers_weights.quantized(case, model, args.samples, args.device))
        found = compare(source, {case.key: quantized}, texts(args, model), FIRST_SCORED, 512, args.batch)
        rows[case.key] = figures(found[case.key], 0)
    return rows


@torch.no_grad()
def measure_persistence(args: argparse.Namespace, model: Path) -> dict[str, list[float]]:
    """Share of a prompt's heavy hitters that still are at a segment's end (MiniKV, section 3.1.1), by segment.

    Heavy hitters are tokens with the most attention received so far, but for the newest quarter of a prompt's number,
    which H2O keeps anyway; at the end generated tokens compete as well. Mean over layers and KV heads.
    """
    source = load_model(model, args.device, RECORDING_ATTENTION)
    config = source.config.get_text_config()
    layers = [module for module in source.modules() if hasattr(module, "k_proj") and hasattr(module, "layer_idx")]
    found: dict[str, list[float]] = {f"{share:.0%}": [] for share in SHARES}
    for ids in texts(args, model):
        seen: list[tuple[Tensor, Tensor]] = []
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(attention_observed(layer, lambda q, k, v, seen=seen: seen.append((q[0], k[0]))))
            arguments = stack.enter_context(attention_arguments(layers[0]))
            source(ids[None].to(args.device), use_cache=False, logits_to_keep=1)
        kept: dict[str, list[Tensor]] = {name: [] for name in found}
        for index, (queries, keys) in enumerate(seen):
            sliding = getattr(config, "layer_types", None) and config.layer_types[index] == "sliding_attention"
            window = config.sliding_window if sliding else None
            scaling, recent = arguments.get("scaling") or queries.shape[2] ** -0.5, PROMPT // 4
            before, after = (
                column_sums(queries[:, :n], keys[:, :n], None, scaling, window=window) for n in (PROMPT, len(ids))
            )
            for share, name in zip(SHARES, found, strict=True):
                count = round(share * PROMPT)
                first, last = (
                    torch.zeros_like(after, dtype=torch.bool).scatter_(1, _heavy(mass, count, recent), True)
                    for mass in (before, after)
                )
                kept[name].append((first & last).sum(1).double() / count)
        for name, shares in kept.items():
            found[name].append(float(torch.stack(shares).mean()))
    return found


def _heavy(mass: Tensor, count: int, recent: int) -> Tensor:
    return select_tokens(mass, count, recent)[:, :count]


def tasks(args: argparse.Namespace, done: Mapping[str, Any]) -> list[tuple[Callable, Sequence[Any]]]:
    """Groups of cases that are not measured yet, each with the function that measures it."""
    wanted = {row.case.key: row.case for name in args.tables for row in TABLES[name]}
    missing = [case for key, case in wanted.items() if key not in done]
    caches = [case for case in missing if isinstance(case, Case) and not (args.uncalibrated and case.calibrates())]
    alike: dict[tuple, list[Case]] = {}
    for case in caches:
        alike.setdefault((case.seals(), case.simulated == "maximum"), []).append(case)
    groups = [group[i : i + GROUP] for group in alike.values() for i in range(0, len(group), GROUP)]
    weights = [case for case in missing if not isinstance(case, Case)]
    weights = [case for case in weights if not (args.uncalibrated and case.method == "awq")]
    return [(measure_caches, group) for group in groups] + [(measure_weights, [case]) for case in weights]


def run(args: argparse.Namespace, model: Path) -> None:
    """Measure what a model's file does not hold."""
    output = args.output / f"papers_{model.name}.json"
    ids = texts(args, model)
    settings = {"segments": args.segments, "length": args.length, "samples": args.samples, "device": args.device}
    settings |= {"prompt": PROMPT, "first_scored": FIRST_SCORED, "seed": 0}
    settings["texts"] = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    report: dict[str, Any] = {"settings": settings, "versions": versions(), "rows": {}}
    found = {} if args.again else read(output)
    if found:
        if found["settings"] == settings:
            report = found
        else:
            print(f"{output.name} was measured otherwise; all of its rows are replaced.", file=sys.stderr)

    work = tasks(args, report["rows"])
    cases = [case for measured, group in work if measured is measure_caches for case in group if case.calibrates()]
    with ExitStack() as stack:
        submit: Callable[..., Any] = _now
        if args.jobs > 1:
            pool = ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"))
            submit = stack.enter_context(pool).submit
        # Two cases may share a calibration: one read page by page, one after a sealed prompt.
        calibrations = {case.recipe().name: case for case in cases}
        for name in tqdm(
            [submit(_calibrate, args, model, c) for c in calibrations.values()], desc=f"{model.name}: calibrating"
        ):
            name.result()
        futures = [submit(measured, args, model, group) for measured, group in work]
        every = as_completed(futures) if args.jobs > 1 else futures
        for future in tqdm(every, total=len(futures), desc=f"{model.name}: measuring"):
            report["rows"] |= future.result()
            save(output, report)
    if "budgets" in args.tables and "persistence" not in report:
        report["persistence"] = measure_persistence(args, model)
    save(output, report)


def _calibrate(args: argparse.Namespace, model: Path, case: Case) -> None:
    calibrated(args, model, case)


class _now:
    """A future in this process, which computes when it is asked."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.result = lambda: function(*arguments)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--text", type=Path, required=True, metavar="DIR", help="of wikitext2-test.txt")
    parser.add_argument(
        "--tables", nargs="+", choices=TABLES, default=list(TABLES), metavar="NAME", help=", ".join(TABLES)
    )
    parser.add_argument("--uncalibrated", action="store_true", help="leave out rows that need calibration")
    parser.add_argument("--segments", type=int, default=8, help="of each text (default: 8)")
    parser.add_argument("--length", type=int, default=1540, help="tokens of a segment (default: 1540)")
    parser.add_argument("--samples", type=int, default=32, help="of 512 tokens, to calibrate on (default: 32)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=4, help="segments at a time")
    parser.add_argument("--jobs", type=int, default=1, help="groups of rows at a time, in processes of their own")
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "papers", help="of calibrations")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "python.txt").write_text(code(), encoding="utf-8")
    for model in args.models:
        run(args, model.resolve())
    print(laboratory(reports(args.output), TABLES))


if __name__ == "__main__":
    main()
