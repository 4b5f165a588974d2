"""Mixture-of-experts text models. An architecture is one entry; what its dense layers and attention are called is data
of `LayerNames`, what its experts are called is data of `Mixture`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from transformers import PretrainedConfig

from kvconvert.models.adapters.adapter import Adapter, LayerNames, Variant
from kvconvert.models.adapters.dense import CLAMPED, GEMMA4_LAYER, GEMMA4_SAME, GEMMA4_SAME_KV, PER_LAYER, SHARED_KV
from kvconvert.models.experts import EXPERT_ROLES, ExpertRoles
from kvconvert.models.structure import LayerStructure, NormGroup, Projection, RoutedExperts, ScalingPair

LLAMA_ROLES, MIXTRAL_ROLES = EXPERT_ROLES
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ROUTER = "the router is scaled with its norm and never quantized"


@dataclass(frozen=True)
class Mixture:
    """The experts of a decoder layer.

    Attributes:
        block: the module that contains them and sums their outputs; its input is the output of `norm`.
        experts, router: module names within the layer.
        roles: names of an expert's Linears, as AWQ checkpoints of this architecture have them.
        shared_readers: further Linears that read the norm: those of shared experts, which get every token.
        shared_pairs: up and down projections of shared experts.
        shared_gate: Linear that weighs a shared expert's output; it stays unquantized.
        shared_count: field of the configuration that is 0 where a model has no shared experts.
        beside: modules other than `block` that read the norm and whose output is added.
        others: modules with weights that are neither scaled nor quantized, with the reason.
        up_unsupported_reason: why no scale may move from an expert's up projection to its down projection.
        norm: the norm that all of them read.
        unit_offset: see `NormGroup`.
        unsupported_reason: why that norm may not be scaled, in a layer whose router does not read it; `block` is then
            the module of experts itself.
    """

    block: str = "mlp"
    experts: str = "mlp.experts"
    router: str = "mlp.gate"
    roles: ExpertRoles = LLAMA_ROLES
    shared_readers: tuple[str, ...] = ()
    shared_pairs: tuple[ScalingPair, ...] = ()
    shared_gate: str | None = None
    shared_count: str | None = None
    beside: tuple[str, ...] = ()
    others: dict[str, str] = field(default_factory=dict)
    up_unsupported_reason: str | None = None
    norm: str = "post_attention_layernorm"
    unit_offset: bool = False
    unsupported_reason: str | None = None

    def added_to(self, structure: LayerStructure, config: PretrainedConfig) -> LayerStructure:
        """The structure of a layer's attention, with the experts."""
        count = next(getattr(config, name) for name in _COUNTS if getattr(config, name, None))
        experts = RoutedExperts(self.experts, count, *self.roles)
        linears = [experts.linears(number) for number in range(count)]
        shares = self.shared_count is None or bool(getattr(config, self.shared_count, None))
        gates = (self.shared_gate,) if shares and self.shared_gate else ()
        readers = [self.router, *gates, *(self.shared_readers if shares else ())]
        readers += [name for gate, up, _ in linears for name in (gate, up)]
        pairs = [ScalingPair(Projection(up), down, self.up_unsupported_reason) for _, up, down in linears]
        kept = {self.router: _ROUTER} | dict.fromkeys(gates, "the shared expert's gate is scaled with its norm only")
        if self.unsupported_reason is not None:
            readers[0] = self.block
            kept = {self.router: "the router is never quantized", self.block: "it holds the experts"}
        return replace(
            structure,
            norm_groups=(
                *structure.norm_groups,
                NormGroup(
                    self.norm,
                    tuple(readers),
                    (self.block, *(self.beside if shares else ())),
                    self.unit_offset,
                    self.unsupported_reason,
                ),
            ),
            pairs=(*structure.pairs, *(self.shared_pairs if shares else ()), *pairs),
            unquantized=structure.unquantized | kept | self.others,
            experts=experts,
        )


def shared_mlp(name: str, **fields: object) -> dict[str, object]:
    """Fields of a `Mixture` with a shared expert built like a Llama MLP."""
    gate, up, down = (f"{name}.{role}" for role in LLAMA_ROLES)
    return {"shared_readers": (gate, up), "shared_pairs": (ScalingPair(Projection(up), down),), **fields}


@dataclass(frozen=True)
class MixtureNames(LayerNames):
    """A decoder layer with experts in the place of its MLP, or, without `mixture`, a dense one beside such layers.

    Attributes:
        mixture: the experts.
        latent: keys and values come from a low-rank projection (multi-head latent attention, DeepSeek).
    """

    mixture: Mixture | None = None
    latent: bool = False

    def structure(self, config: PretrainedConfig) -> LayerStructure:
        """With the attention shape and the number of experts of a text configuration."""
        structure = super().structure(config)
        if self.latent:
            structure = _latent(structure, config)
        return structure if self.mixture is None else self.mixture.added_to(structure, config)


def _latent(structure: LayerStructure, config: PretrainedConfig) -> LayerStructure:
    """Latent attention: kv_b_proj makes each head's values, and the keys' channels without RoPE, of a latent vector."""
    attention, heads = structure.attention, config.num_attention_heads
    blocks = (config.qk_nope_head_dim, config.v_head_dim)
    query = f"{attention}.q_proj" if config.q_lora_rank is None else f"{attention}.q_b_proj"
    first = query if config.q_lora_rank is None else f"{attention}.q_a_proj"
    up, down = f"{attention}.kv_b_proj", f"{attention}.kv_a_proj_with_mqa"
    groups = [NormGroup("input_layernorm", (first, down), (attention,))]
    if config.q_lora_rank is not None:
        groups.append(NormGroup(f"{attention}.q_a_layernorm", (query,), (query,)))
    groups.append(NormGroup(f"{attention}.kv_a_layernorm", (up,), (up,)))
    return replace(
        structure,
        query=Projection(query),
        key=Projection(up, blocks, 0, heads),
        value=Projection(up, blocks, 1, heads),
        norm_groups=(*groups, *structure.norm_groups[1:]),
        num_key_value_heads=heads,
        head_dim=config.v_head_dim,
        fold_unsupported_reason="latent attention makes keys and values from a shared latent vector",
    )


@dataclass(frozen=True)
class SparseLayers(Variant):
    """Layers with experts among dense ones.

    Attributes:
        rule: whether the layer of this index has experts.
    """

    rule: Callable[[PretrainedConfig, int], bool] = lambda config, index: True

    def applies(self, config: PretrainedConfig, index: int) -> bool:
        """Whether layer `index` has experts."""
        return super().applies(config, index) and self.rule(config, index)


def by_step(config: PretrainedConfig, index: int) -> bool:
    """Whether a Qwen model has experts in this layer."""
    return index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0


def _after_dense(config: PretrainedConfig, index: int) -> bool:
    return index >= config.first_k_dense_replace


def _by_interval(config: PretrainedConfig, index: int) -> bool:
    within = config.moe_layer_start_index <= index <= config.moe_layer_end_index
    return within and (index + 1) % config.moe_layer_interval == 0


def _typed(config: PretrainedConfig, index: int) -> bool:
    return config.mlp_layer_types[index] == "sparse"


def _listed(config: PretrainedConfig, index: int) -> bool:
    return index in config.moe_layers


def _mixture(mixture: Mixture, **names: object) -> MixtureNames:
    return MixtureNames(norm_groups=LayerNames().norm_groups[:1], pairs=(), mixture=mixture, **names)


def _among_dense(
    rule: Callable[[PretrainedConfig, int], bool], mixture: Mixture, dense: LayerNames | None = None, **names: object
) -> dict[str, object]:
    """Fields of an `Adapter` whose layers have experts or not by a rule."""
    sparse = SparseLayers({}, _mixture(mixture, **names), rule)
    return {"layer": dense or MixtureNames(**names), "variants": (sparse,)}


_SHARED_EXPERTS = Mixture(**shared_mlp("mlp.shared_experts"))
_GRANITE = Mixture("block_sparse_moe", "block_sparse_moe.experts", "block_sparse_moe.router", MIXTRAL_ROLES)
GRANITE_SHARED = replace(
    _GRANITE,
    shared_readers=("shared_mlp.input_linear",),
    shared_pairs=(ScalingPair(Projection("shared_mlp.input_linear", (1, 1), 1), "shared_mlp.output_linear"),),
    shared_count="shared_intermediate_size",
    beside=("shared_mlp",),
)
_LLAMA4_DENSE = LayerNames(
    norm_groups=(
        LayerNames().norm_groups[0],
        NormGroup("post_attention_layernorm", ("feed_forward.gate_proj", "feed_forward.up_proj"), ("feed_forward",)),
    ),
    pairs=(ScalingPair(Projection("feed_forward.up_proj"), "feed_forward.down_proj"),),
)

GEMMA4_EXPERTS = Mixture(
    "experts",
    "experts",
    "router.proj",
    norm="pre_feedforward_layernorm_2",
    unsupported_reason="the router, without whose choice the experts cannot be compared, reads another input",
)


def beside_mlp(layer: LayerNames, mixture: Mixture) -> MixtureNames:
    """The same layer with experts beside its MLP."""
    return MixtureNames(**{field.name: getattr(layer, field.name) for field in fields(layer)}, mixture=mixture)


MIXTURES = (
    Adapter(
        "gemma4_text",
        "Gemma4ForCausalLM",
        GEMMA4_LAYER,
        (
            Variant(GEMMA4_SAME | {"enable_moe_block": True}, beside_mlp(GEMMA4_SAME_KV, GEMMA4_EXPERTS)),
            Variant({"enable_moe_block": True}, beside_mlp(GEMMA4_LAYER, GEMMA4_EXPERTS)),
            Variant(GEMMA4_SAME, GEMMA4_SAME_KV),
        ),
        refusals={"num_kv_shared_layers": SHARED_KV, "hidden_size_per_layer_input": PER_LAYER},
    ),
    Adapter("mixtral", "MixtralForCausalLM", _mixture(Mixture(roles=MIXTRAL_ROLES))),
    Adapter(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        **_among_dense(by_step, Mixture(**shared_mlp("mlp.shared_expert", shared_gate="mlp.shared_expert_gate"))),
    ),
    Adapter("qwen3_moe", "Qwen3MoeForCausalLM", **_among_dense(by_step, Mixture())),
    Adapter(
        "gpt_oss",
        "GptOssForCausalLM",
        _mixture(
            Mixture(
                router="mlp.router",
                up_unsupported_reason="experts compute (up + 1) times the gate, which is not linear in up",
            )
        ),
    ),
    Adapter(
        "llama4_text",
        "Llama4ForCausalLM",
        **_among_dense(
            _listed,
            Mixture(
                "feed_forward",
                "feed_forward.experts",
                "feed_forward.router",
                **shared_mlp("feed_forward.shared_expert"),
            ),
            dense=_LLAMA4_DENSE,
        ),
    ),
    Adapter("deepseek_v2", "DeepseekV2ForCausalLM", **_among_dense(_after_dense, _SHARED_EXPERTS, latent=True)),
    Adapter("deepseek_v3", "DeepseekV3ForCausalLM", **_among_dense(_after_dense, _SHARED_EXPERTS, latent=True)),
    Adapter(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        **_among_dense(
            _by_interval,
            Mixture(
                **shared_mlp("mlp.shared_experts", shared_count="moe_num_shared_experts"),
                others={"mlp.gate.moe_statics": "statistics that correct the router's choice"},
            ),
        ),
    ),
    Adapter("glm4_moe", "Glm4MoeForCausalLM", **_among_dense(_after_dense, _SHARED_EXPERTS)),
    Adapter("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **_among_dense(_typed, _SHARED_EXPERTS, latent=True)),
    Adapter("exaone_moe", "ExaoneMoeForCausalLM", **_among_dense(_typed, _SHARED_EXPERTS)),
    Adapter("mellum", "MellumForCausalLM", **_among_dense(_typed, Mixture())),
    Adapter("solar_open", "SolarOpenForCausalLM", _mixture(_SHARED_EXPERTS)),
    Adapter("minimax_m2", "MiniMaxM2ForCausalLM", _mixture(Mixture(roles=MIXTRAL_ROLES))),
    Adapter("phimoe", "PhimoeForCausalLM", _mixture(Mixture(router="mlp.router", roles=MIXTRAL_ROLES))),
    Adapter("dots1", "Dots1ForCausalLM", **_among_dense(_after_dense, _SHARED_EXPERTS)),
    Adapter(
        "olmoe",
        "OlmoeForCausalLM",
        _mixture(Mixture()),
        fixed_values={"clip_qkv": CLAMPED},
    ),
    Adapter("granitemoe", "GraniteMoeForCausalLM", _mixture(_GRANITE)),
    Adapter(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        _mixture(GRANITE_SHARED),
    ),
    Adapter(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        _mixture(Mixture(router="mlp.gate.wg", **shared_mlp("mlp.shared_mlp"))),
    ),
)
