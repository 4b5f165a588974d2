"""The parts that all cases of `benchmarks/real_model.py` share, and the report that grows row by row."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from real_model_cases import LENGTH, SAMPLES, Calibrated, Case, Workshop
from real_model_measure import Retrieval, cache_size, launches_of, text_figures
from runner import read, save
from transformers import AutoConfig, AutoTokenizer

from kvconvert.data.text import spaced_samples
from kvconvert.errors import KvconvertError
from kvconvert.fidelity.evaluate import versions
from kvconvert.fidelity.scoring import Decoder
from kvconvert.kernels.launches import make_ready
from kvconvert.models.configuration import head_dim, key_value_heads

CODE = "python"  # the text that is made of the standard library
CODE_FILES = (Path(__file__).resolve().parent / "real_model_code.txt").read_text(encoding="utf-8").split()

_bench: Bench | None = None  # of a process that measures some of the cases


class Bench:
    """Texts, prompts, and source that all cases share, and the report that grows row by row."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        on_gpu = args.device.startswith("cuda")
        dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
        self.batch = args.batch or (32 if on_gpu else 4)
        self.shop = Workshop(
            args.model,
            args.calibration,
            args.work,
            torch.device(args.device),
            getattr(torch, dtype),
            args.again,
            args.calibrate_on,
        )
        self.jobs = args.jobs or (4 if on_gpu else 1)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.config = AutoConfig.from_pretrained(args.model)
        names = args.texts.split(",")
        files = {name: str(args.text / f"{name}.txt") for name in names}
        if CODE in files:
            files[CODE] = str(library_text(args.work))
        self.texts = {n: spaced_samples(file, tokenizer, args.segments, args.length) for n, file in files.items()}
        lengths = [int(length) for length in filter(None, args.retrieval.split(","))]
        prose = spaced_samples(files[names[-1]], tokenizer, 1, max([args.length, *lengths]) * 4).flatten().tolist()
        pairs = [int(count) for count in filter(None, args.json.split(","))]
        self.retrieval = Retrieval(tokenizer, self.config, prose, lengths, pairs, args.prompts, args.seed)
        self.source = Decoder.plain(self.shop.source())
        # Rows are comparable, and kept, only while these are the same.
        self.settings = {
            "model": args.model.name,
            "shape": {
                "model_type": self.config.model_type,
                "layers": self.config.num_hidden_layers,
                "heads": self.config.num_attention_heads,
                "kv_heads": key_value_heads(self.config),
                "head_dim": head_dim(self.config),
                "positions": self.config.max_position_embeddings,
            },
            "texts": names,
            "segments": args.segments,
            "length": args.length,
            "retrieval": list(self.retrieval.drills["found"]),
            "json": list(self.retrieval.drills["json"]),
            "prompts": args.prompts,
            "seed": args.seed,
            "dtype": dtype,
            "calibrated_on": {
                "text": Path(args.calibration or "books-calib").name,
                "samples": SAMPLES,
                "length": LENGTH,
            },
        }
        if CODE in files:
            self.settings["python"] = ".".join(platform.python_version_tuple()[:2])
        if on_gpu:
            self.settings["device"] = torch.cuda.get_device_name(self.shop.device)
        self.report = self._begin()

    def _begin(self) -> dict[str, Any]:
        report: dict[str, Any] = {"settings": self.settings, "versions": versions(), "source": {}, "caches": {}}
        if old := read(self.args.output):
            if old["settings"] == self.settings:
                report |= {key: old[key] for key in ("source", "caches")}
            else:
                print(f"{self.args.output} was measured otherwise; all of its rows are replaced.", file=sys.stderr)
        return report

    def save(self) -> None:
        save(self.args.output, self.report)

    def measure_source(self) -> None:
        if not self.report["source"] or self.args.again:
            self.report["source"] = self.retrieval.of(self.source, "source", self.batch)
            self.save()

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those that have no row yet."""
        rows = self.report["caches"]
        return [n for n in dict.fromkeys(names) if self.args.again or n not in rows or "failure" in rows[n]]

    def row(self, name: str) -> dict[str, Any]:
        """A row, not yet in the report; a case that cannot be measured gets the reason."""
        begun = time.monotonic()
        try:
            calibrated = self.shop.cache_of(Case.parse(name))
            row = self._row(calibrated, name, {"calibration": time.monotonic() - begun})
        except KvconvertError as error:
            row = {"failure": str(error)}
            print(f"{name}: {error}", file=sys.stderr)
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        return row

    def measure_caches(self, names: Sequence[str]) -> None:
        """Rows of several caches, calibrated and measured at a time in processes of their own: most of it is launching.

        Searches that differ in the budget alone wait for the first of them.
        """
        if self.jobs < 2 or len(names) < 2:
            for name in names:
                self.report["caches"][name] = self.row(name)
                self.save()
            return
        waiting: dict[str, list[str]] = {}  # the first of each search and the others
        for name in names:
            waiting.setdefault(self._search(name) or name, []).append(name)
        context = multiprocessing.get_context("spawn")
        count = min(self.jobs, len(names))
        with ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(self.args,)) as pool:
            # Searches take longest.
            order = sorted(waiting, key=lambda search: self._search(waiting[search][0]) is None)
            rows = {pool.submit(_row_of_cache, waiting[search].pop(0), None): search for search in order}
            while rows:
                done, _ = wait(rows, return_when=FIRST_COMPLETED)
                for row in done:
                    search = rows.pop(row)
                    name, figures = row.result()
                    self.report["caches"][name] = figures
                    self.save()
                    first = None if "failure" in figures else name
                    for other in waiting.pop(search, ()):
                        rows[pool.submit(_row_of_cache, other, first)] = search

    def _search(self, name: str) -> str | None:
        """The key of a search, see `Workshop.search_of`; None for a case that searches nothing."""
        case = Case.parse(name)
        return self.shop.search_of(case) if case.preset == "auto" else None

    def _row(self, made: Calibrated, name: str, seconds: dict[str, float]) -> dict[str, Any]:
        if self.shop.device.type == "cuda":
            begun = time.monotonic()
            rows = {min(self.batch, count) for count in (sum(map(len, self.texts.values())), self.args.prompts)}
            make_ready(launches_of(made.decoder, sorted(rows)), self.shop.device)
            seconds["kernels"] = time.monotonic() - begun
        begun = time.monotonic()
        row = text_figures(self.source, made.decoder, self.texts, self.batch)
        seconds["text"] = time.monotonic() - begun
        row["size"] = cache_size(self.config, made.schemes, made.plan, self.args.length, self.args.device)
        seconds["size"] = time.monotonic() - begun - seconds["text"]
        row |= self.retrieval.of(made.decoder, name, self.batch)
        seconds["retrieval"] = time.monotonic() - begun - seconds["text"] - seconds["size"]
        distinct = {json.dumps(s and s.to_dict(), sort_keys=True) for s in made.schemes}
        row["calibrated_on"] = self.shop.calibrate_on
        return row | {"seconds": {k: round(v, 1) for k, v in seconds.items()}, "schemes": sorted(distinct)}


def library_text(work: Path) -> Path:
    """One text of the modules of Python's standard library that benchmarks/real_model_code.txt lists."""
    root = Path(sysconfig.get_path("stdlib"))
    file = work / f"python-{platform.python_version()}.txt"
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in CODE_FILES)
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        work.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return file


def _begin(args: argparse.Namespace) -> None:
    global _bench
    torch.set_num_threads(2)
    _bench = Bench(args)


def _row_of_cache(name: str, searched: str | None) -> tuple[str, dict[str, Any]]:
    """A row and its name, calibrated with the measurements of the search `searched`."""
    assert _bench is not None
    if searched is not None:
        case = Case.parse(searched)
        _bench.shop.searched(case, _bench.shop.directory_of(case) / "work")
    return name, _bench.row(name)


def joined(parts: list[str]) -> list[str]:
    """Names cut at commas, put together where a part is a change of the name before it."""
    names: list[str] = []
    for part in parts:
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names
