"""What ahead-of-time compilation has to know of a kernel's specialisations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

# Triton's names for the dtypes of tokens, activations and queries.
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel that its dispatch can choose.

    Attributes:
        name: unique within the kernel's module.
        function: the `triton.jit` function.
        signature: type of each argument that is not a constant: "*fp16", "*i16", "*i64", "i32", "fp32" and so on.
            Pointers are taken as 16-byte aligned.
        constants: values of the `tl.constexpr` arguments.
        num_warps, num_stages: launch options.
        max_registers: launch option `maxnreg`, registers per thread; None for no limit.
        axes: what varies between variants, for choosing a covering subset.
        codes: low-bit codes that one program handles per iteration of its main loop; 0 where there are none.
        tensor_cores: whether matrix instructions are a must.
        wide_loads: whether codes must be read 16 bytes at a time.
        code_bytes: bytes of these codes per iteration of the main loop and program; 0 where wide loads may be any.
        most_per_code: thread instructions of the main loop per code that must not be exceeded; the default is what
            converting codes one by one would take.
        most_local: share of the main loop's instructions that may access spilled registers.
        spills: why registers are spilled to memory, where that is known and cannot be helped.
    """

    name: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    axes: dict[str, Any] = field(default_factory=dict)
    codes: int = 0
    tensor_cores: bool = False
    wide_loads: bool = False
    max_registers: int | None = None
    code_bytes: int = 0
    most_per_code: float = 6.0
    most_local: float = 0.05
    spills: str = ""
