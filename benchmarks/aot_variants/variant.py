"""A kernel's specializations for ahead-of-time compilation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

# Triton's names for the dtypes of tokens, activations and queries.
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# Arguments by their type, for all kernels; of those that are not here `Variant.of` is told, or they are integers.
OWN = (
    "bias cos gate k k_output keys output pairs_y q q_output queries residual sin source target total up values weight "
    "weights x y key_base key_matrix value_base value_matrix"
)
TYPES = {
    "fp32": "alpha eps factor key_normaliser limit normaliser offset scaling shrink softcap value_normaliser",
    "*fp32": "extremes first_sum log_sum_exp output_sum partial scratch second_sum sink_logits sums",
    "*fp16": "feedback static_scales static_offsets",
    "*i16": "lanes records",
    "*i32": "counts flag grid order starts",
    "*i64": "chosen feedback_table first_tokens offsets table",
    "*u8": "record_bytes",
}
ARGUMENTS = {name: kind for kind, names in TYPES.items() for name in names.split()}


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel that its dispatch can choose.

    Attributes:
        name: unique within the kernel's module.
        function: what is launched, or a `triton.jit` function.
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

    @classmethod
    def of(
        cls,
        name: str,
        function: Any,
        dtype: str,
        constants: dict[str, Any],
        num_warps: int,
        *,
        types: dict[str, str] | None = None,
        num_stages: int = 3,
        **others: Any,
    ) -> Variant:
        """A variant of a kernel for a dtype; `types` are those of arguments that `ARGUMENTS` does not know."""
        known = ARGUMENTS | dict.fromkeys(OWN.split(), f"*{dtype}") | (types or {})
        signature = {
            argument: known.get(argument, "i32") for argument in function.arg_names if argument not in constants
        }
        return cls(name, function, signature, constants, num_warps, num_stages, **others)
