"""Rows that `benchmarks/real_model.py` measured in several runs, put into one report.

    python benchmarks/real_model_merge.py FILE [FILE ...] --output REPORT

Reports are merged if they were measured in the same way. A row that several have must be the same in all, but for the
time it took; the first is kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import option_parser, save

from kvconvert.errors import UsageError


def merged(reports: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """One report with the rows of all, those of the first first; `names` are said where they differ (UsageError)."""
    result = json.loads(json.dumps(reports[0]))
    for report, name in zip(reports[1:], names[1:], strict=True):
        settings = report["settings"].keys() | result["settings"].keys()
        other = [key for key in settings if report["settings"].get(key) != result["settings"].get(key)]
        other += [key for key in ("source", "baseline") if report[key] != result[key]]
        if other:
            raise UsageError(f"{name} was measured otherwise than {names[0]}: {', '.join(sorted(other))}.")
        for table in ("caches", "bundles"):
            for case, row in report[table].items():
                kept = result[table].setdefault(case, row)
                if _figures(kept) != _figures(row):
                    raise UsageError(f"{name} has other figures of {case} than the files before it.")
    return result


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, help="merged with the files if it is there")
    args = parser.parse_args()
    files = [args.output, *args.files] if args.output.is_file() else args.files
    try:
        report = merged([json.loads(file.read_text(encoding="utf-8")) for file in files], [*map(str, files)])
    except UsageError as error:
        sys.exit(f"Error: {error}")
    save(args.output, report)


if __name__ == "__main__":
    main()
