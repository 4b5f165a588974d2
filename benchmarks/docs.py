"""Write every table and picture of the documentation that is made from results or from the code: `make docs`.

    python benchmarks/docs.py

Nothing is measured here: figures come from benchmarks/results, tests/test_matrix/models.json, and the methods'
classes. A test fails where a page differs from what this writes; read then whether the text beside it still fits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import fidelity
import gpu_docs
import methods_docs
import readme_docs
import real_model_docs
import weights_docs
from runner import RESULTS, ROOT, read
from tables import put

from kvconvert.bundle.manifest import schema_text
from kvconvert.tables import markdown_table as table


@cache
def results(name: str) -> Any:
    """One file of results."""
    return read(RESULTS / f"{name}.json")


def memory(found: dict[str, Any]) -> str:
    """The peaks of `calibrate` and `export`."""
    rows = [
        (case["shape"], case["layers"], weights_docs.NAMES.get(case["recipe"], case["recipe"]),
         *(f"{case[step]['peak_anonymous_bytes'] / 1e9:.2f} GB" for step in ("calibrate", "export")))
        for case in found["cases"]
    ]  # fmt: skip
    return table(("shape", "layers", "weights", "calibrate", "export"), rows)


def matrix() -> str:
    """The architectures."""
    file = ROOT / "tests" / "test_matrix" / "models.json"
    return methods_docs.architectures(read(file))


def types() -> str:
    """Every type of transformers, by what came of it."""
    return methods_docs.types(read(ROOT / "tests" / "test_models" / "sweep.json"))


def picture(colors: dict[str, str], stacked: bool) -> str:
    """README's picture, of the first model that has a report."""
    return readme_docs.picture(real_model_docs.reports()[0], results("engine"), colors, stacked)


def of(make: Callable[[Any], str], name: str) -> Callable[[], str]:
    """A table that is made from one file of results."""
    return lambda: make(results(name))


# For each page its tables by the names of their places.
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"costs": lambda: readme_docs.costs(real_model_docs.reports())},
    "docs/choosing.md": {
        "sizes": methods_docs.sizes,
        "real models": lambda: real_model_docs.comparison(real_model_docs.reports()),
    },
    "docs/methods.md": {
        "methods": methods_docs.methods,
        "presets": methods_docs.presets,
        "weights": of(weights_docs.summary, "calibrate"),
    },
    "docs/models.md": {
        "architectures": matrix,
        "types": types,
    },
    "docs/performance.md": {
        "whole models": of(gpu_docs.whole_models, "engine"),
        "kernels": of(gpu_docs.kernels, "gpu"),
        "cpu": of(gpu_docs.on_cpu, "cpu_models"),
    },
    "docs/bundle.md": {"plan tensors": methods_docs.plan_tensors, "scheme fields": methods_docs.scheme_fields},
    "benchmarks/RESULTS.md": {
        "real models": lambda: real_model_docs.sections(real_model_docs.reports()),
        "fidelity": of(fidelity.tables, "fidelity"),
        "memory": of(memory, "memory"),
    },
    "benchmarks/WEIGHTS.md": {
        "methods": of(weights_docs.methods, "weights"),
        "llm-compressor": of(weights_docs.beside_peers, "calibrate"),
    },
    "benchmarks/KERNELS.md": {
        "decode": of(gpu_docs.decode, "gpu"),
        "quantize": of(gpu_docs.quantize, "gpu"),
        "prompts": of(gpu_docs.prompts, "gpu"),
        "linear": of(gpu_docs.linear, "gpu"),
    },
}
# Files that are made as a whole.
FILES: dict[str, Callable[[], str]] = {
    "docs/manifest.schema.json": schema_text,
    "docs/overview-light.svg": partial(picture, readme_docs.LIGHT, False),
    "docs/overview-dark.svg": partial(picture, readme_docs.DARK, False),
    "docs/overview-narrow-light.svg": partial(picture, readme_docs.LIGHT, True),
    "docs/overview-narrow-dark.svg": partial(picture, readme_docs.DARK, True),
}


def page_of(name: str) -> str:
    """A page of the working tree with its tables made anew."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for place, make in PAGES[name].items():
        text = put(text, place, make())
    return text


MAKERS: dict[str, Callable[[], str]] = {name: partial(page_of, name) for name in PAGES} | FILES


def main() -> None:
    for name, make in MAKERS.items():
        (ROOT / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
