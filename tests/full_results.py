"""What `make test-full` found, and on which sources, so that CI can tell when it has to be run again.

    python tests/full_results.py --record JUNIT.xml     keep the outcome of a run beside the hash of the sources

The hash covers the code that figures depend on, without comments, docstrings and blank lines: wording does not count.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import sys
import tokenize
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "full-results.json"
SOURCES = (
    "kernels",
    "calibration",
    "runtime",
    "kvconvert",
    "benchmarks/fidelity.py",
    "tests/test_claims.py",
    "tests/test_presets.py",
)
# Nothing that these do can change a figure.
EXCEPT = ("kvconvert/cli.py", "kvconvert/console.py", "kvconvert/__main__.py", "kvconvert/bundle/summary.py")


def source_hash() -> str:
    """SHA-256 over names and code of all sources."""
    digest = hashlib.sha256()
    for source in SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = file.relative_to(ROOT).as_posix()
            if name not in EXCEPT:
                digest.update(f"{name}\n{_code(file)}\n".encode())
    return digest.hexdigest()


def _code(file: Path) -> str:
    """The file's lines without docstrings, comments and blank lines; the same on every version of Python."""
    text = file.read_text(encoding="utf8")
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="JUNIT.xml", required=True)
    args = parser.parse_args()
    tests = {}
    for case in ElementTree.parse(args.record).iter("testcase"):
        failed = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        tests[f"{case.get('classname')}::{case.get('name')}"] = "not passed" if failed else "passed"
    if not tests or "not passed" in tests.values():
        sys.exit(f"{args.record} holds {len(tests)} tests, not all of them passed; nothing was recorded.")
    RESULTS.write_text(json.dumps({"sources": source_hash(), "tests": tests}, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
