"""Every Triton kernel compiled ahead of time for sm_80, sm_89, sm_90 and sm_100, without a GPU, and what came of it.

Run: python benchmarks/aot.py            a covering subset, in a minute or two
     python benchmarks/aot.py --full     what `make test-full` checks, in about a quarter of an hour
     add --json benchmarks/results/aot.json to keep the figures after a kernel has changed

It fails (exit status 1) where a kernel does not compile, spills registers, takes more shared memory than there is,
lacks matrix instructions or wide loads that it should have, or takes too many instructions per code. Figures of
variants that a run does not compile stay in the files as they were, unless the run is a full one of all modules.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Values that are left to the full run, where pairs of all values would take the subset too long.
FULL_ONLY: dict[str, dict[str, tuple[Hashable, ...]]] = {
    "decode": {
        "head_size": (48, 64, 80, 96, 192, 256),
        "value_size": (48, 64, 80, 96, 192, 256),
        "dtype": ("fp16", "fp32"),
        "rows": ("1x1", "2x1", "7x1", "8x1", "16x1", "4x4", "1x16"),
        "format": (
            "kivi",
            "oscar",
            "kitty-pro",
            "minikv",
            "calibquant-2bit",
            "widths",
            "groups",
            "static",
            "norm",
            "boost",
            "half",
            "span",
        ),
        "slots": (64,),
    },
    "prompt": {"head_size": (48, 80, 96, 192), "dtype": ("fp16",)},
    "pages": {
        "HEAD_SIZE": (64, 256),
        "dtype": ("fp16", "fp32"),
        "GROUP": (16, 64),
        "BITS": (8,),
        "BOOSTED": (20, 32),
    },
    "history": {
        "head_size": (48, 64, 96, 256),
        "dtype": ("fp16", "fp32"),
        "group": (16, 64),
        "boosted": (12,),
    },
    "center": {"dtype": ("fp32",), "rows": ("1x1", "4x4"), "head_size": (80,)},
    "rotate": {"head_size": (64, 96, 256), "dtype": ("fp16", "fp32")},
    "elementwise": {"dtype": ("fp32",), "columns": (128, 8192), "size": (64, 256)},
    "experts": {"dtype": ("bf16",), "k_block": (32, 64), "rows": (16, 64)},
    "linear_few_rows": {"k_block": (64,), "dtype": ("fp16",)},
    "linear_many_rows": {"k_block": (64,)},
    "linear_widths": {"dtype": ("fp16",), "groups": (2,), "rows": (16, 64, 128)},
}
TUNED_ON = 90
# Modules with more variants than this are covered by pairs even in the full run, others by triples.
MANY_VARIANTS = 300


def covering(rows: Sequence[Mapping[str, Hashable]], strength: int = 2, first: Sequence[int] = ()) -> list[int]:
    """Indices of rows that together have every combination of `strength` values that any row has, in order.

    A combination is of values of different axes; rows may lack axes. The greedy choice, the row with most combinations
    that are still missing and of equals the first, is deterministic and within a logarithm of the smallest subset. The
    rows `first` are chosen beforehand.
    """
    have = [set(combinations(sorted(row.items(), key=lambda item: item[0]), min(strength, len(row)))) for row in rows]
    missing = set().union(*have).difference(*(have[index] for index in first))
    # Gains only shrink, so that a stale entry which still leads after an update is the best.
    queue = [(-len(own), index) for index, own in enumerate(have)]
    heapq.heapify(queue)
    chosen = list(first)
    while missing:
        _, index = heapq.heappop(queue)
        gain = len(have[index] & missing)
        if gain and queue and (-gain, index) > queue[0]:
            heapq.heappush(queue, (-gain, index))
        elif gain:
            chosen.append(index)
            missing -= have[index]
    return sorted(chosen)


def selected(full: bool, names: list[str]) -> list[tuple[str, str, int]]:
    """A run's jobs: module, variant and capability.

    Pairs, in the full run of smaller modules triples, of all values that variants differ in, the architecture being one
    of them. In the full run the usual variants of each kernel (axis "usual") are there for every architecture; in the
    other one, every single value and every architecture is there, and the usual variants for one architecture.
    """
    from aot_compile import CAPABILITIES, groups

    chosen = []
    for short, variants_for in groups(names):
        lists = {capability: list(variants_for(capability)) for capability in CAPABILITIES}
        if full:
            pairs = [(variant, capability) for capability in CAPABILITIES for variant in lists[capability]]
            axes = [variant.axes | {"capability": capability} for variant, capability in pairs]
            strength = 2 if len(lists[CAPABILITIES[0]]) > MANY_VARIANTS else 3
            chosen += [(short, pairs[i][0].name, pairs[i][1]) for i in covering(axes, strength)]
        chosen += list(_taking_turns(short, lists, full))
    return sorted(set(chosen))


def _taking_turns(module: str, lists: dict[int, list[Any]], full: bool) -> Iterator[tuple[str, str, int]]:
    """A covering of pairs among the variants of all architectures that `FULL_ONLY` leaves, each for one of these.

    The usual variants are among them, for the architecture that the kernels are tuned on. Unless the run is a full one,
    only those which together have every single value.
    """
    capabilities = list(lists)
    left_out = FULL_ONLY.get(module, {})
    everywhere = set.intersection(*({variant.name for variant in variants} for variants in lists.values()))
    variants = [
        variant
        for variant in lists[TUNED_ON]
        if variant.name in everywhere and not any(variant.axes.get(axis) in values for axis, values in left_out.items())
    ]
    axes = [{axis: value for axis, value in variant.axes.items() if axis != "usual"} for variant in variants]
    usual = [index for index, variant in enumerate(variants) if "usual" in variant.axes]
    others = [index for index in covering(axes, first=usual) if index not in usual]
    found = [(variants[index], TUNED_ON) for index in usual]
    found += [(variants[index], capabilities[turn % len(capabilities)]) for turn, index in enumerate(others)]
    if not full:
        values = [
            {axis: value for axis, value in variant.axes.items() if axis != "usual"} | {"capability": capability}
            for variant, capability in found
        ]
        found = [found[index] for index in covering(values, 1, range(len(usual)))]
    yield from ((module, variant.name, capability) for variant, capability in found)


def _prepare(search: list[str]) -> None:
    sys.path[:0] = [path for path in search if path not in sys.path]


def _compile(task: tuple[str, str, int]) -> dict[str, Any]:
    """The row of one task with what is wrong about it; runs in a process of its own, which keeps the lists."""
    from aot_compile import groups, measure, problems

    name, variant_name, capability = task
    if (name, capability) not in _VARIANTS:
        (group,) = groups([name])
        _VARIANTS[name, capability] = {variant.name: variant for variant in group.variants(capability)}
    variant = _VARIANTS[name, capability][variant_name]
    try:
        row = measure(variant, capability)
    except Exception as error:  # compilers fail in many ways, and all others are to be heard of, too
        row = {"name": variant_name, "capability": capability, "failed": f"{type(error).__name__}: {error}"[-500:]}
        return {"module": name, "usual": False, "spills": "", "problems": ["does not compile"]} | row
    about = {"module": name, "usual": "usual" in variant.axes, "spills": variant.spills}
    return about | {"problems": problems(row, variant)} | row


_VARIANTS: dict[tuple[str, int], dict[str, Any]] = {}


def run(tasks: list[tuple[str, str, int]], jobs: int) -> list[dict[str, Any]]:
    """All rows, in order; progress goes to stderr."""
    rows = []
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_prepare, initargs=(sys.path,)) as pool:
        for done, row in enumerate(pool.map(_compile, tasks), 1):
            rows.append(row)
            place = f"{row['module']} {row['name']} sm_{row['capability']}"
            if row["problems"]:
                print(f"{place}: {'; '.join(row['problems'])}. {row.get('failed', '')}", flush=True)
            if done % 10 == 0 or done == len(tasks):
                print(f"{done} of {len(tasks)} compiled", file=sys.stderr, flush=True)
    return rows


def merged(path: Path, rows: list[dict[str, Any]], everything: bool) -> list[dict[str, Any]]:
    """These rows and those of the file that they do not replace, unless they are everything; sorted."""
    kept = [] if everything or not path.exists() else read_json(path)["rows"]
    table = {(row["module"], row["name"], row["capability"]): row for row in [*kept, *rows]}
    return [table[key] for key in sorted(table)]


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    """The table, a row per line, with the names of its columns and the versions of the compilers."""
    import triton
    from aot_compile import assembler_version

    columns = list(dict.fromkeys(column for row in rows for column in row))
    head = {"triton": triton.__version__, "ptxas": assembler_version(), "columns": columns}
    lines = ",\n".join("  " + json.dumps([row.get(column) for column in columns]) for row in rows)
    path.write_text(f'{json.dumps(head)[:-1]},\n "rows": [\n{lines}\n]}}\n', encoding="utf8")


def read_json(path: Path) -> dict[str, Any]:
    """The rows of a report, by the names of their columns."""
    table = json.loads(path.read_text(encoding="utf8"))
    return table | {"rows": [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the wide sweep")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--module", action="append", default=[], help="only this group of variants, by its name")
    parser.add_argument("--list", action="store_true", help="say how much would be compiled, and stop")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        # Kernels imported under the interpreter cannot be compiled; Triton reads all of this when it is imported.
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ |= {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
        tasks = selected(args.full, args.module)
        if args.list:
            modules = sorted({module for module, _, _ in tasks})
            print({module: sum(task[0] == module for task in tasks) for module in modules}, len(tasks))
            return
        rows = run(tasks, args.jobs)
        if args.json:
            write_json(args.json, merged(args.json, rows, args.full and not args.module))
    wrong = sum(bool(row["problems"]) for row in rows)
    print(f"{len(rows)} variants compiled, {wrong} with problems.")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
