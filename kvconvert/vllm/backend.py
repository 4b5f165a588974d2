"""The attention backend: vLLM's view of the low-bit cache."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvconvert.errors import BundleError
from kvconvert.kernels.decode import unsupported
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.pages import PAGE_SIZE, LayerFormat
from kvconvert.vllm.attention import PLAIN, LayerStep, Logits, quantize_pending
from kvconvert.vllm.blocks import BlockLayout
from kvconvert.vllm.bundle import ServedBundle, layer_index, served_bundle
from kvconvert.vllm.layer import LayerBatch, LayerBlocks, alike
from kvconvert.vllm.passes import LowBitMetadata, PassPlanner
from kvconvert.vllm.rehearsal import STAND_INS
from kvconvert.vllm.settings import MODEL_DRAFTS
from kvconvert.vllm.spec import LowBitSpec


class LowBitBackend(AttentionBackend):
    """Blocks of 128 tokens whose bytes are a bundle's pages."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    # The one bundle of this process, once its first layer is built, and among how many ranks its heads are divided. How
    # many tokens may be drafted at a time, and whether by layers that have a cache.
    served: ClassVar[ServedBundle | None] = None
    ranks: ClassVar[int] = 1
    drafts: ClassVar[int] = 0
    drafts_by_model: ClassVar[bool] = False
    has_begun: ClassVar[bool] = False

    @staticmethod
    def get_name() -> str:
        """The name under which vLLM knows backends from outside."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LowBitAttention]:
        """What computes."""
        return LowBitAttention

    @staticmethod
    def get_builder_cls() -> type[LowBitMetadataBuilder]:
        """What plans a pass."""
        return LowBitMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """A block is a page, or several where vLLM's blocks are as large as another layer's states."""
        return [PAGE_SIZE]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Any, which is that of other layers: ours have their own."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Logits of a virtual token."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Beside layers of another backend, whose pages have other sizes, all layers' pages of a block side by side, if
        that backend can read them so; vLLM's for CPUs cannot.
        """
        if cls.served is None or not (cls.served.has_windows or cls.drafts_by_model):
            return None
        return KVCacheLayout.BLNHC, KVCacheLayout.BLHNC, KVCacheLayout.LBHNC

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The bytes of a token, for a block of one token that vLLM aligns states with; layers have theirs by `spec`."""
        if isinstance(spec, LowBitSpec) or cls.served is None:
            return spec
        if spec.block_size > 1:
            raise _unserved("a layer", spec)
        layouts = cls.served.layouts(spec.dtype, cls.ranks, cls.drafts).values()
        most = max(-(-layout.block_bytes // PAGE_SIZE) for layout in layouts)
        return replace(spec, num_head_slots=1, state_content_bytes=most)

    @classmethod
    def spec(cls, layer_name: str, spec: AttentionSpec) -> LowBitSpec:
        """The blocks of an attention layer, each one record of a page's bytes.

        Raises:
            BundleError: the layer does not attend to all tokens.
        """
        layouts = {} if cls.served is None else cls.served.layouts(spec.dtype, cls.ranks, cls.drafts)
        layout = layouts.get(layer_index(layer_name))
        if layout is None or not isinstance(spec, FullAttentionSpec):
            raise _unserved(layer_name, spec)
        same = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
        packed = {"num_head_slots": 1, "state_content_bytes": layout.block_bytes, "tokens_per_state": PAGE_SIZE}
        # Beside states blocks have the size that vLLM has chosen, several pages.
        packed["block_size"] = spec.block_size if cls.served.has_states else PAGE_SIZE
        return LowBitSpec(**same | packed, pages_ahead=layout.blocks_ahead, sink_pages=layout.first_page)

    @classmethod
    def begin_to_compile(cls, config: VllmConfig) -> None:
        """Begin to compile kernels, once for all layers, before vLLM compiles its own and there is a cache."""
        device = torch.empty(0, device=config.device_config.device_type).device
        if cls.has_begun or not runs_triton(device):
            return
        cls.has_begun = True
        layers = _layers_of(config)
        blocks = [layer.impl.stand_in(layer, device) for layer in layers]
        PassPlanner.begin(config, blocks, [(layer.impl.num_heads, layer.impl.logits) for layer in layers])


def _layers_of(config: VllmConfig) -> list[Any]:
    """All layers whose attention is ours."""
    every = config.compilation_config.static_forward_context.values()
    return [one for one in every if isinstance(getattr(one, "impl", None), LowBitAttention)]


def _unserved(layer: str, spec: AttentionSpec) -> BundleError:
    kind = type(spec).__name__
    return BundleError(
        f"The plugin serves causal attention over all tokens, and the cache of {layer} is a {kind}; use `kvconvert "
        "serve`."
    )


class LowBitMetadataBuilder(AttentionMetadataBuilder[LowBitMetadata]):
    """Plans each pass for the layers of one size of blocks, from lengths that the host knows."""

    # Kernels of a pass of single tokens read tables in fixed places, which are written before it.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._known: list[LayerBlocks] = []
        self._alike: list[LayerBatch] = []
        self._planner: PassPlanner | None = None
        # Requests with one new token come first.
        self._init_reorder_batch_threshold(1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LowBitMetadata:
        """The plan of the pass."""
        context = self.vllm_config.compilation_config.static_forward_context
        layers = [context[name].impl.blocks(context[name]) for name in self.layer_names]
        if layers != self._known:
            self._known, self._alike = layers, alike(layers)
            self._planner = PassPlanner.of(self.vllm_config, layers, common_attn_metadata)
            if self._planner.is_new:
                # Those of all builders, so that their kernels are compiled side by side.
                every = _layers_of(self.vllm_config)
                blocks = [layer.impl.blocks(layer) for layer in every]
                self._planner.rehearse(blocks, [(layer.impl.num_heads, layer.impl.logits) for layer in every])
        metadata = self._planner.plan(common_attn_metadata)
        quantize_pending(self._alike, metadata.plan)
        return metadata


class LowBitAttention(AttentionImpl[LowBitMetadata]):
    """One layer's attention over its blocks."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ):
        unserved = {
            "ALiBi slopes": alibi_slopes,
            "a sliding window": sliding_window,
            "another layer's cache": kv_sharing_target_layer_name,
            **others,
        }
        for name, value in unserved.items():
            if value:
                raise BundleError(
                    f"This model's attention has {name}, which the plugin does not serve in vLLM; use "
                    "`kvconvert serve`."
                )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        config = get_current_vllm_config()
        LowBitBackend.served = self.served = served_bundle(config.model_config.model)
        LowBitBackend.ranks = self.ranks = config.parallel_config.tensor_parallel_size
        LowBitBackend.drafts, drafts = config.num_speculative_tokens, config.speculative_config
        LowBitBackend.drafts_by_model = drafts is not None and drafts.method in MODEL_DRAFTS
        self.rank = get_tensor_model_parallel_rank()
        self._softcap, self._sinks, self.logits = logits_soft_cap or None, sinks, PLAIN
        self._blocks: LayerBlocks | None = None

    def blocks(self, layer: Any) -> LayerBlocks | None:
        """The layer's blocks; None before vLLM has allocated them."""
        memory = layer.kv_cache
        if not memory.numel():
            return None
        known = self._blocks is not None and self._blocks.words.data_ptr() == memory.data_ptr()
        if not known or len(self._blocks.words) != len(memory):
            self._blocks = LayerBlocks(*self._cache(layer, memory.device), layer.dtype, memory)
        return self._blocks

    def stand_in(self, layer: Any, device: torch.device) -> LayerBlocks:
        """Blocks like the layer's, before vLLM has allocated these."""
        format, layout = self._cache(layer, device)
        memory = torch.empty(STAND_INS, layout.block_bytes, dtype=torch.uint8, device=device)
        return LayerBlocks(format, layout, layer.dtype, memory)

    def _cache(self, layer: Any, device: torch.device) -> tuple[LayerFormat, BlockLayout]:
        index = layer_index(layer.layer_name)
        found = self.served.layer(index, device, layer.dtype, self.rank, self.ranks, LowBitBackend.drafts)
        if runs_triton(device):
            query = torch.empty(1, self.num_heads, 1, self.head_size, dtype=layer.dtype, device=device)
            reason = unsupported(query, found[0], layer.dtype)
            if reason is not None:
                raise BundleError(f"This bundle cannot be served on a GPU ({reason}); use `kvconvert serve`.")
        # Loaded by now; a copy in fixed places, which CUDA graphs may hold.
        sinks = None if self._sinks is None else self._sinks.detach().float().contiguous()
        self.logits = Logits(self._softcap, sinks)
        return found

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: LowBitMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention [n, Hq, D] of the pass's tokens, which it stores."""
        if attn_metadata is None:
            # vLLM measures what a pass takes, before there is a cache.
            if runs_triton(query.device):
                PassPlanner.workspace(query.device)
            return output.fill_(0)
        count = attn_metadata.num_actual_tokens
        pass_, blocks = attn_metadata, self.blocks(layer)
        step = LayerStep(blocks, pass_.plan, self.scale, pass_.prompts, pass_.tables, self.logits)
        step.run(query[:count], key[:count], value[:count], output[:count])
        return output
