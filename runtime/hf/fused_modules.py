"""Modules of transformers whose forward is replaced by one launch, on instances and after trying values, and packed
experts in the place of fused ones.

Classes and sources stay as they are. A module is taken for what its values say, never for its name alone: its own
forward and the kernel's reference have to agree on random inputs. What a kernel does not serve (other dtypes, a
gradient, training) goes to the module's own forward.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter

from kvconvert.bundle.locate import MANIFEST_NAME
from kvconvert.bundle.manifest import ModuleCoverage
from kvconvert.errors import BundleError
from kvconvert.kernels import device as devices
from kvconvert.kernels import experts as expert_kernels
from kvconvert.kernels.elementwise import (
    Gate,
    Norm,
    gated,
    gated_reference,
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
    rotary,
    rotary_reference,
    unsupported,
)
from kvconvert.kernels.experts import routed_experts, scored_experts, store_experts
from kvconvert.kernels.linear import QuantizedLinear
from kvconvert.models.experts import (
    EXPERT_ROLES,
    FUSED_BIASES,
    FUSED_WEIGHTS,
    SeparateExperts,
    expert_names,
    fused_layout,
    is_fused,
)

ROTARY, ATTENTION = "apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"
# Share of values whose last bit may differ, because a float32 result is computed in another order.
MOST_UNEQUAL = 0.02

_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
# Values to try: far enough for any limit, near enough for every bend.
_GRID = (
    -40.0, -9.0, -7.5, -6.5, -3.0, -1.3, -0.6, -0.1, 0.0, 0.05, 0.4, 1.1, 2.5, 5.0, 6.8, 7.2, 9.5, 11.0, 40.0, 300.0,
)  # fmt: skip


def fuse_norm(module: nn.Module, dtype: torch.dtype) -> bool:
    """Replace the forward of an RMSNorm for inputs of a dtype; whether the module is one."""
    kind = _find_norm(module, dtype)
    if kind is None:
        return False

    module.norm_kind = kind
    module.forward = types.MethodType(_norm_forward, module)
    return True


def fuse_gated_norm(module: nn.Module, dtype: torch.dtype) -> bool:
    """Replace the forward of an RMSNorm that multiplies with silu of a gate; whether the module is one."""
    kind = _find_norm(module, dtype, gated=True)
    if kind is None:
        return False

    def forward(self: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
        if unsupported(x, gate, self.weight) is not None:
            return type(self).forward(self, x, gate)
        return gated_rms_norm(x, gate, self.weight, kind)

    module.forward = types.MethodType(forward, module)
    return True


def _norm_forward(self: nn.Module, x: Tensor) -> Tensor:
    ahead = self.__dict__.pop("ahead", None)
    if ahead is not None and ahead[0]() is x and ahead[1] == x._version:
        return ahead[2]
    weight = getattr(self, "weight", None)
    if unsupported(x, *([] if weight is None else [weight])) is not None:
        return type(self).forward(self, x)
    return rms_norm(x, weight, self.norm_kind)


def norm_kind(module: nn.Module | None) -> Norm | None:
    """Which norm a module with a weight computes, if `fuse_norm` has replaced its forward."""
    return getattr(module, "norm_kind", None) if getattr(module, "weight", None) is not None else None


def norm_ahead(module: nn.Module, x: Tensor, normed: Tensor) -> None:
    """Let a fused norm hand out `normed` when it is next called, if that is with this very `x`, unchanged."""
    module.ahead = (weakref.ref(x), x._version, normed)


def _find_norm(module: nn.Module, dtype: torch.dtype, gated: bool = False) -> Norm | None:
    """Which norm a module computes, of one tensor, or with `gated` of one and its gate; None if it is none."""
    parameters = dict(module.named_parameters())
    eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    weight = parameters.get("weight")
    if (
        not isinstance(eps, float)
        or set(parameters) - {"weight"}
        or any(True for _ in module.children())
        or (weight is not None and (weight.dim() != 1 or weight.dtype != dtype or weight.is_meta))
        or not _takes_tensors(module, 1 + gated)
        or (gated and weight is None)
    ):
        return None
    device = torch.device("cpu") if weight is None else weight.device
    channels = 64 if weight is None else len(weight)
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([3e-3, 0.1, 1.0, 30.0])[:, None]
    x, gate = ((torch.randn(4, channels, generator=generator) * scales).to(device, dtype) for _ in range(2))
    try:
        found = type(module).forward(module, *((x, gate) if gated else (x,)))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None
    for kind in (Norm(eps), Norm(eps, rounded=False), Norm(eps, offset=1.0, rounded=False)):
        expected = gated_rms_norm_reference(x, gate, weight, kind) if gated else rms_norm_reference(x, weight, kind)
        if _equal_but_for_rounding(found, expected):
            return kind
    return None


def fuse_gated_mlp(module: nn.Module, dtype: torch.dtype) -> bool:
    """Replace the forward of down_proj(activation(gate_proj(x)) * up_proj(x)); whether the module computes that."""
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in ("gate_proj", "up_proj", "down_proj")):
        return False
    names = ("act_fn", "activation_fn", "act")
    activation = next((getattr(module, name) for name in names if callable(getattr(module, name, None))), None)
    if activation is None or not _takes_tensors(module, 1):
        return False
    kind = find_gate(lambda gate, up: activation(gate) * up, module)
    if kind is None or not _computes_gated_mlp(module, dtype, kind):
        return False

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if self.training or unsupported(x) is not None:
            return type(self).forward(self, x)
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), kind))

    module.forward = types.MethodType(forward, module)
    return True


def _computes_gated_mlp(module: nn.Module, dtype: torch.dtype, kind: Gate) -> bool:
    tensors = [*module.gate_proj.parameters(), *module.gate_proj.buffers()]
    if not tensors or any(tensor.is_meta for tensor in tensors):
        return False
    inputs: list[Tensor] = []
    hook = module.down_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        # Large values, too: some clamp.
        for scale in (1.0, 40.0):
            x = torch.randn(1, 2, module.gate_proj.in_features, generator=torch.Generator().manual_seed(0))
            x = (x * scale).to(tensors[0].device, dtype)
            found = type(module).forward(module, x)
            expected = module.down_proj(gated_reference(module.gate_proj(x), module.up_proj(x), kind))
            if not (_equal_but_for_rounding(*inputs) and _equal_but_for_rounding(found, expected)):
                return False
            inputs.clear()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return False
    finally:
        hook.remove()
    return True


def fuse_rotary(module: nn.Module) -> bool:
    """Let an attention module rotate queries and keys in one launch; whether it does so by halves, in its own dtype.

    Its forward is copied with another global of the name `apply_rotary_pos_emb`, for this instance only.
    """
    forward = inspect.unwrap(type(module).forward)  # from what renames arguments for a while
    own = getattr(forward, "__globals__", {}).get(ROTARY)
    if not isinstance(forward, types.FunctionType) or own is None:
        return False
    if not {ROTARY, ATTENTION} <= {*forward.__code__.co_names}:  # such as an indexer, which reads the cache by itself
        return False
    if "forward" in module.__dict__ or not _rotates_by_halves(own, 16):
        return False
    # Some functions leave the channels beyond cos and sin as they are, others take no such heads.
    takes_more = _rotates_by_halves(own, 24)

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        served = not args and not kwargs and q.dim() == k.dim() == 4 and cos.dim() == 3
        served = served and (cos.shape[-1] == q.shape[-1] or (takes_more and cos.shape[-1] < q.shape[-1]))
        if not served or unsupported(q, k, cos, sin) is not None:
            return own(q, k, cos, sin, *args, **kwargs)
        return rotary(q, k, cos, sin)

    copied = types.FunctionType(
        forward.__code__,
        forward.__globals__ | {ROTARY: apply_rotary_pos_emb},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    copied.__annotations__ = forward.__annotations__
    module.forward = types.MethodType(copied, module)
    return True


def _rotates_by_halves(function: Callable[..., Any], head_size: int) -> bool:
    """Whether a function rotates the first 16 channels of heads as `rotary_reference` does."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 4, head_size), (2, 1, 4, head_size), (2, 4, 16), (2, 4, 16))
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        try:
            found = function(*tensors)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        pairs = zip(found, rotary_reference(*tensors), strict=True)
        if len(found) != 2 or not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
            return False
    return True


def _takes_tensors(module: nn.Module, count: int) -> bool:
    if "forward" in module.__dict__:
        return False
    parameters = inspect.signature(type(module).forward).parameters.values()
    return len(parameters) == 1 + count and not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _equal_but_for_rounding(found: Any, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    error = (found.double() - expected.double()).abs()
    size = expected.double().abs().clamp_min(1e-3 * float(expected.abs().double().mean()))
    few = float((found != expected).double().mean()) <= MOST_UNEQUAL or found.dtype == torch.float32
    return few and bool((error <= 8 * torch.finfo(found.dtype).eps * size).all())


def find_gate(function: Callable[[Tensor, Tensor], Tensor], module: nn.Module) -> Gate | None:
    """The `Gate` that a function of gate and up [n] (float32, on the CPU) computes; None if there is no such one.

    `module` is asked for the constants `alpha` and `limit`, which some activations have.
    """
    grid = torch.tensor(_GRID)
    gate, up = (values.flatten() for values in torch.meshgrid(grid, grid, indexing="ij"))
    found = function(gate, up)
    for kind in _gates_of(module):
        if torch.allclose(found, gated_reference(gate, up, kind), rtol=1e-5, atol=1e-6):
            return kind
    return None


def _gates_of(module: nn.Module) -> list[Gate]:
    kinds = [Gate(activation) for activation in _ACTIVATIONS]
    limit = next((getattr(module, name) for name in ("limit", "swiglu_limit") if hasattr(module, name)), None)
    if isinstance(limit, (int, float)):
        alpha = getattr(module, "alpha", 1.0)
        alphas = {1.0, float(alpha)} if isinstance(alpha, (int, float)) else {1.0}
        kinds += [Gate("silu", alpha, float(limit), offset) for alpha in sorted(alphas) for offset in (0.0, 1.0)]
    return kinds


class PackedExperts(SeparateExperts):
    """Experts of packed Linears: on a GPU a fixed number of kernels without the host, elsewhere one after another.

    What the kernels do not serve (see `kvconvert.kernels.experts.unsupported`) is computed expert by expert, too; the
    first such call on a GPU logs a warning.
    """

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """As in `SeparateExperts`."""
        if not devices.runs_triton(hidden_states.device):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        if "stored" not in self.__dict__:
            linears = [tuple(expert[role] for role in self.roles.linears) for expert in self.experts()]
            self.gate = find_gate(self._joined, self.gating) if self.layout.gated else self.gating.act_fn
            self.stored = store_experts(linears)
        reason = expert_kernels.unsupported(hidden_states, self.stored, self.gate)
        if reason is not None:
            devices.fall_back("Experts with quantized weights", reason)
            return super().forward(hidden_states, top_k_index, top_k_weights)
        if self.layout.scored_before:
            return scored_experts(hidden_states, self.stored, self.gate)
        return routed_experts(hidden_states, top_k_index, top_k_weights, self.stored, self.gate)

    def __getstate__(self) -> dict[str, Any]:
        # Buffers belong to these Linears; a copy's make their own.
        return {name: value for name, value in self.__dict__.items() if name not in ("stored", "gate")}


def place_packed_experts(model: nn.Module, modules: Iterable[ModuleCoverage]) -> None:
    """Replace, on the meta device, fused experts by packed ones wherever a manifest calls them quantized.

    Args:
        model: with transformers' fused experts.
        modules: the manifest's coverage.

    Raises:
        BundleError: the coverage names some of a layer's experts and not others, or passes over them.
    """
    coverage = {module.name: module for module in modules}
    if all(module.method == "kept" for module in coverage.values()):
        return
    for name, fused in [(name, module) for name, module in model.named_modules() if is_fused(module)]:
        roles = next((roles for roles in EXPERT_ROLES if f"{name}.0.{roles.down}" in coverage), None)
        if roles is None:
            if name not in coverage and not any(other.startswith(f"{name}.") for other in coverage):
                raise BundleError(
                    f"{MANIFEST_NAME} does not list {name}, the experts of a layer of {type(model).__name__}; "
                    "the bundle belongs to another architecture or version of transformers."
                )
            continue
        parts = expert_names(name, fused_layout(fused), roles)
        missing = [part for part in parts if part not in coverage]
        kept = [part for part in parts if part not in missing and coverage[part].method == "kept"]
        if len(kept) == len(parts):
            continue  # transformers fuses what it reads
        if missing or kept:
            part, fault = (missing[0], "does not list") if missing else (kept[0], "keeps unquantized")
            raise BundleError(
                f"{MANIFEST_NAME} {fault} {part}, an expert beside quantized ones; experts of a layer are quantized "
                "together, so the bundle is damaged or belongs to another version of transformers."
            )
        made = iter([coverage[part] for part in parts])  # each expert's Linears in the order of its roles

        def make(inputs: int, outputs: int, bias: bool, made: Iterator[ModuleCoverage] = made) -> QuantizedLinear:
            module = next(made)
            return QuantizedLinear(inputs, outputs, module.group_size, bias, bits=module.bits)

        with torch.device("meta"):
            packed = PackedExperts(fused, roles, make)
        model.set_submodule(name, packed)


def packed_linears(model: nn.Module) -> list[QuantizedLinear]:
    """A model's Linears with packed weights, but for those of experts, which have a product of their own."""
    experts = {id(part) for m in model.modules() if isinstance(m, PackedExperts) for part in m.modules()}
    return [module for module in model.modules() if isinstance(module, QuantizedLinear) and id(module) not in experts]


def merges_experts(conversion: Any) -> bool:
    """Whether one of transformers' weight conversions makes fused experts."""
    return isinstance(conversion, WeightConverter) and any(
        target.rpartition(".")[2] in FUSED_WEIGHTS + FUSED_BIASES for target in conversion.target_patterns
    )
