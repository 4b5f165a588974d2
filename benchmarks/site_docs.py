"""Sources of the site that mkdocs.yml makes: the pages where they lie, and a reference of the public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "benchmarks/*.md")
# What README shows as HTML, whose links MkDocs leaves alone.
PICTURES = "docs/overview-*.svg"
# A page of the reference, the package that it shows, and where its public names are listed.
REFERENCE = {
    "reference/kvconvert.md": ("kvconvert", "kvconvert/__init__.py"),
    "reference/runtime.md": ("kvconvert.runtime", "runtime/__init__.py"),
}
PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
OF_THE_SYSTEM = re.compile(r"<source [^>]*prefers-color-scheme[^>]*>\s*")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """The files of the site, each where the repository has it."""
    from mkdocs.structure.files import File, Files

    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    linked = {target for page in pages for target in linked_files(page)}
    found = [*pages, *sorted(ROOT.glob(PICTURES)), *sorted(linked - {*pages})]
    kept = [File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)) for path in found]
    kept += [File.generated(config, name, content=reference(*what)) for name, what in REFERENCE.items()]
    themes = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*kept, *themes])


def on_page_content(html: str, **_: Any) -> str:
    """A page whose pictures are light or dark as the site is, which may be otherwise than the reader's system."""
    return PICTURE.sub(_of_both_schemes, html)


def _of_both_schemes(picture: re.Match[str]) -> str:
    # The theme hides an image whose address ends in the name of the other scheme.
    light = OF_THE_SYSTEM.sub("", picture[0]).replace("-light.svg", "-light.svg#only-light")
    return light + light.replace("light", "dark")


def linked_files(page: Path) -> set[Path]:
    """Files of the repository that a page links to and that are no pages."""
    targets = {(page.parent / target).resolve() for target in LINK.findall(page.read_text(encoding="utf8"))}
    return {target for target in targets if target.is_file() and target.suffix != ".md"}


def public_names(file: str) -> list[str]:
    """The names that a package lists in `__all__`, read and not imported."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf8"))
    (listed,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    )
    return [name for name in ast.literal_eval(listed) if not name.startswith("_")]


def reference(package: str, file: str) -> str:
    """The Markdown of a page of the reference, for mkdocstrings."""
    lines = [f"# {package}", "", "[The guide](../docs/runtime.md) has examples.", ""]
    return "\n".join([*lines, *(f"::: {package}.{name}\n" for name in public_names(file))])
