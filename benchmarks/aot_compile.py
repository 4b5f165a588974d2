"""One specialisation of a kernel, compiled for an architecture without a GPU, and what its machine code says.

Triton must have been imported without TRITON_INTERPRET, under which kernels cannot be compiled.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aot_variants
import triton
from aot_sass import Instruction, main_loop, parse
from aot_variants.variant import Variant
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 89, 90, 100)
# What the architecture lets one program take, in bytes.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
THREADS_PER_WARP = 32
BYTES_PER_WIDE_LOAD = 16
_PTX_MATRIX = re.compile(r"^\s*(?:@\S+ )?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", re.MULTILINE)


class Group(NamedTuple):
    """Variants that are covered together: by their name, and listed for a compute capability."""

    name: str
    variants: Callable[[int], Iterator[Variant]]


def groups(names: list[str]) -> Iterator[Group]:
    """The groups of these names, all if there are none: a module's `GROUPS`, or its `variants` under its own name.

    A name that no module of aot_variants has is that of a module elsewhere.
    """
    found = {}
    for each in pkgutil.iter_modules(aot_variants.__path__):
        module = importlib.import_module(f"{aot_variants.__name__}.{each.name}")
        own = getattr(module, "GROUPS", None) or {each.name: getattr(module, "variants", None)}
        found |= {name: list_of for name, list_of in own.items() if list_of is not None}
    for name in names or sorted(found):
        yield Group(name, found[name] if name in found else importlib.import_module(name).variants)


def compile_variant(variant: Variant, capability: int) -> Any:
    """Triton's compiled kernel, as a launch on such a GPU would make it.

    Pointers are 16-byte aligned; so are, counted in elements, integers that a launch specialises on, which are strides.
    """
    function = getattr(variant.function, "function", variant.function)
    types = {name: "constexpr" if name in variant.constants else variant.signature[name] for name in function.arg_names}
    attributes = {}
    for parameter in function.params:
        kind = types[parameter.name]
        if kind.startswith("*") or (kind in ("i32", "i64") and not parameter.do_not_specialize):
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    constants = {(function.arg_names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.max_registers is not None:
        options["maxnreg"] = variant.max_registers
    return triton.compile(source, target=GPUTarget("cuda", capability, THREADS_PER_WARP), options=options)


def measure(variant: Variant, capability: int) -> dict[str, Any]:
    """The variant's row of the table.

    Returns:
        name, capability; registers per thread; stack: bytes of local memory per thread; local: instructions that access
        it; shared: bytes of shared memory per program; warps; instructions in all; loop: those of the main loop; matrix
        and wide: the main loop's matrix instructions and wide loads; per_code: thread instructions of the main loop per
        low-bit code, None where the variant has no codes. Without a loop the last five are of the whole kernel.
        unrolled: whether the assembler made more matrix instructions than it was given, so that the main loop may be
        several iterations of the kernel's.
    """
    compiled = compile_variant(variant, capability)
    listing, usage = disassemble(compiled.asm["cubin"])
    row = {"name": variant.name, "capability": capability}
    row |= summary(listing, usage, compiled.metadata.shared, variant)
    written = len(_PTX_MATRIX.findall(compiled.asm["ptx"]))
    return row | {"unrolled": written > 0 and sum(x.is_matrix for x in listing) > written}


def summary(listing: list[Instruction], usage: dict[str, int], shared: int, variant: Variant) -> dict[str, Any]:
    """The figures of a row from a listing and from what `disassemble` says of the kernel."""
    loop = main_loop(listing)
    body = [listing[i] for i in loop.body] if loop else [x for x in listing if x.opcode != "NOP"]
    threads = variant.num_warps * THREADS_PER_WARP
    return {
        "registers": usage["REG"],
        "stack": usage["STACK"],
        "local": sum(x.is_local for x in listing),
        "shared": shared,
        "warps": variant.num_warps,
        "instructions": sum(x.opcode != "NOP" for x in listing),
        "loop": len(body),
        "matrix": sum(x.is_matrix for x in body),
        "wide": sum(x.is_wide_load for x in body),
        "loop_local": sum(x.is_local for x in body),
        "bulk": sum(x.is_wide_load and x.is_bulk_copy for x in body),
        "per_code": round(len(body) * threads / variant.codes, 3) if variant.codes else None,
    }


def disassemble(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """A kernel's listing, and its resources as cuobjdump names them: REG, STACK, SHARED, LOCAL."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = _run("nvdisasm", "-c", file.name)
        usage = _run("cuobjdump", "-res-usage", file.name)
    return parse(listing), {name: int(count) for name, count in re.findall(r"\b([A-Z]+):(\d+)", usage)}


def assembler_version() -> str:
    """The version of the assembler that Triton brings."""
    return re.search(r"V(\d[\d.]*)", _run("ptxas", "--version"))[1]


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def problems(row: dict[str, Any], variant: Variant) -> list[str]:
    """The faults of a row."""
    found = []
    if (row["stack"] or row["local"]) and not variant.spills:
        found.append(f"spills: {row['stack']} bytes of stack, {row['local']} accesses to local memory")
    if row["loop_local"] > variant.most_local * row["loop"]:
        found.append(f"{row['loop_local']} of {row['loop']} instructions of the main loop access local memory")
    if row["shared"] > SHARED_MEMORY[row["capability"]]:
        found.append(f"shared memory: {row['shared']} bytes of {SHARED_MEMORY[row['capability']]}")
    if variant.tensor_cores and not row["matrix"]:
        found.append("no matrix instruction in the main loop")
    if row["per_code"] is not None and row["per_code"] > variant.most_per_code:
        found.append(f"instructions per code: {row['per_code']} of {variant.most_per_code}")
    if row["per_code"] is not None and row["unrolled"]:
        found.append("the assembler unrolled a loop, so that instructions per code are of several iterations")
    if variant.wide_loads and not row["bulk"]:
        loaded = row["wide"] * BYTES_PER_WIDE_LOAD * THREADS_PER_WARP * variant.num_warps
        if loaded < max(variant.code_bytes, 1):
            found.append(f"wide loads: {loaded} bytes by 16-byte loads, {variant.code_bytes} bytes of codes")
    return found
