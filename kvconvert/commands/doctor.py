"""kvconvert doctor: what this machine has of what kvconvert needs."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvconvert.errors import KvconvertError, listed
from kvconvert.tables import beside
from kvconvert.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement

GIB = 2**30
# Of kvconvert's own requirements these are large and compiled, so that having them does not mean that they load.
IMPORTED = ("torch", "triton", "transformers")
NOT_FOR_USERS = ("dev", "site")
WIDTH = len("transformers")  # of names in the list


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: short.
        state: what was found.
        problem: what is broken and what to do, where kvconvert cannot work without it.
        is_missing: it is optional, and not there.
    """

    name: str
    state: str
    problem: str | None = None
    is_missing: bool = False


def examine() -> Iterator[Finding]:
    """Everything, in the order in which it is shown; importing torch takes seconds."""
    yield _python()
    broken = set()
    for found in _packages():
        broken |= {found.name} if found.problem else set()
        yield found
    if "torch" not in broken:
        yield from _processors()
    yield _memory()
    yield _disk()
    yield from _extras()


def _python() -> Finding:
    version = platform.python_version()
    return Finding("python", f"{version} on {platform.system()} {platform.machine()}, {sys.prefix}")


def requirements(distribution: str = "kvconvert") -> list[Requirement]:
    """Requirements of the installed package, with its extras; none where it was not installed by an installer."""
    from packaging.requirements import Requirement

    try:
        return [Requirement(text) for text in metadata.requires(distribution) or ()]
    except metadata.PackageNotFoundError:
        return []


def check_package(requirement: Requirement) -> Finding:
    """Whether a needed package is there, new enough and can be imported."""
    name = requirement.name
    remedy = f'install it with pip install "{name}{requirement.specifier}"'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", f"{name} is not installed; {remedy}")
    if not requirement.specifier.contains(version, prereleases=True):
        said = f"{name} is {version}, and kvconvert needs {requirement.specifier}; {remedy}"
        return Finding(name, f"{version}, needed is {requirement.specifier}", said)
    if name in IMPORTED:
        try:
            importlib.import_module(name)
        except Exception as error:  # a package that does not load may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return Finding(name, f"{version}, does not load ({reason})", f"{name} does not load ({reason}); {remedy}")
    return Finding(name, version)


def _packages() -> Iterator[Finding]:
    needed = [r for r in requirements() if r.marker is None or r.marker.evaluate({"extra": ""})]
    if not needed:
        yield Finding("kvconvert", "not installed by pip: what it needs is not known")
    named = {requirement.name: requirement for requirement in needed}
    yield from (check_package(named.pop(name)) for name in IMPORTED if name in named)
    others = [check_package(requirement) for requirement in named.values()]
    yield from (finding for finding in others if finding.problem)
    fine = ", ".join(f"{finding.name} {finding.state}" for finding in others if not finding.problem)
    if fine:
        yield Finding("others", fine)


def _processors() -> Iterator[Finding]:
    """GPUs, or why the CPU computes; and what the CPU can do."""
    import torch

    from kvconvert.kernels.device import multiplies_bfloat16, unsupported

    bfloat16 = "with" if multiplies_bfloat16() else "without"
    counts = f"cores: {os.cpu_count()}, threads that torch uses: {torch.get_num_threads()}"
    yield Finding("cpu", f"{counts}, {bfloat16} bfloat16 instructions")
    if not torch.cuda.is_available():
        build = (
            f"torch was built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch was built without CUDA"
        )
        yield Finding("gpu", f"none that torch finds ({build}): models run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        try:
            torch.ones(1, device=device).sum().item()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            yield Finding(
                f"gpu {index}",
                f"{name}: fails",
                f"GPU {index} ({name}) does not compute ({reason}); use "
                "a torch that is built for it, or hide it with CUDA_VISIBLE_DEVICES",
            )
            continue
        free, total = torch.cuda.mem_get_info(index)
        plain = unsupported(device)
        kernels = "runs the kernels" if plain is None else f"takes the plain PyTorch path: {plain}"
        memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield Finding(f"gpu {index}", f"{name}, compute capability {major}.{minor}, {memory}; {kernels}")
        if index == 0 and plain is None:
            yield check_compiler()


def check_compiler() -> Finding:
    """Triton compiles a small C file at each kernel's first use, against Python's headers."""
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler is None or shutil.which(compiler) is None:
        problem = "Triton finds no C compiler; install gcc, or name one in the variable CC"
        return Finding("compiler", "none", problem)
    if not headers.is_file():
        return Finding(
            "compiler",
            compiler,
            f"Triton needs Python's headers and {headers} does not exist; install them "
            f"(python{sys.version_info[0]}.{sys.version_info[1]}-dev or -devel)",
        )
    return Finding("compiler", compiler)


def _memory() -> Finding:
    file = Path("/proc/meminfo")
    if file.is_file():
        sizes = {
            name: int(number) * 1024
            for name, number in re.findall(r"(\w+): +(\d+) kB", file.read_text(encoding="ascii"))
        }
        return Finding("memory", f"{sizes['MemAvailable'] / GIB:.1f} of {sizes['MemTotal'] / GIB:.1f} GiB free")
    return Finding("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB")


def _disk() -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = f"{shutil.disk_usage(existing).free / GIB:.1f} GiB free"
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        free += "; cannot be written, so models of the Hub cannot be fetched: set HF_HOME"
    return Finding("Hub cache", f"{cache}, {free}")


def _extras() -> Iterator[Finding]:
    """The optional extras, each with what it lacks."""
    every = requirements()
    names = sorted({name for r in every if r.marker for name in re.findall(r'extra == "([\w-]+)"', str(r.marker))})
    present = []
    for extra in names:
        if extra in NOT_FOR_USERS:
            continue
        needed = [
            r
            for r in every
            if r.marker and not r.marker.evaluate({"extra": ""}) and r.marker.evaluate({"extra": extra})
        ]
        lacking = [r.name for r in needed if check_package(r).problem]
        if lacking:
            remedy = f'pip install ".[{extra}]" in a clone of kvconvert'
            yield Finding("extra", f"{extra}: {listed(lacking)} not installed; {remedy}", is_missing=True)
        else:
            present.append(extra)
    if present:
        yield Finding("extras", f"{', '.join(present)}: present")


def line(found: Finding) -> str:
    """A finding as a line, which begins with what it means."""
    sign = "!!" if found.problem else "--" if found.is_missing else "ok"
    return beside(f"{sign}  {found.name.ljust(WIDTH)}  ", found.state)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def doctor(as_json: bool) -> None:
    """Show whether this machine has what kvconvert needs; fails if something needed is broken."""
    findings = []
    if not as_json:
        click.echo(f"kvconvert {__version__}")
    for found in examine():
        findings.append(found)
        if not as_json:
            click.echo(line(found))
    if as_json:
        told = {"kvconvert": __version__, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(told, indent=2))
    problems = [finding.problem for finding in findings if finding.problem]
    if problems:
        raise KvconvertError(f"{'; '.join(problems)}.")
