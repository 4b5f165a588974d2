"""The attention backend: vLLM's view of the low-bit cache."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kvconvert.errors import BundleError
from kvconvert.kernels import ragged
from kvconvert.kernels.decode import unsupported
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.vllm.attention import LayerStep, quantize_pending
from kvconvert.vllm.bundle import ServedBundle, layer_index, served_bundle
from kvconvert.vllm.flash import flash_attention
from kvconvert.vllm.layer import LayerBatch, LayerBlocks, alike
from kvconvert.vllm.prompts import WORKSPACE_BYTES, PackedPrompts, Packing, divide_prompts
from kvconvert.vllm.rehearsal import prepare, rehearse
from kvconvert.vllm.spec import LowBitSpec
from kvconvert.vllm.step import Request, StepPlan, plan_step
from kvconvert.vllm.tables import DecodeTables
from kvconvert.vllm.weights import rehearse_products


class LowBitBackend(AttentionBackend):
    """Blocks of 128 tokens whose bytes are a bundle's pages."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    # The one bundle of this process, once its first layer is built, and among how many ranks its heads are divided.
    served: ClassVar[ServedBundle | None] = None
    ranks: ClassVar[int] = 1
    _workspace: ClassVar[torch.Tensor | None] = None

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
        """A block is a page."""
        return [PAGE_SIZE]

    @classmethod
    def workspace(cls, device: torch.device) -> torch.Tensor:
        """Memory for prompts, reserved once and before vLLM gives the rest to the cache."""
        if cls._workspace is None or cls._workspace.device != device:
            cls._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return cls._workspace

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A block as one record of a page's bytes."""
        if isinstance(spec, LowBitSpec):
            return spec
        if not isinstance(spec, FullAttentionSpec) or cls.served is None:
            kind = type(spec).__name__
            raise BundleError(
                f"The plugin serves causal attention over all tokens, and a layer's cache is a {kind}; use "
                "`kvconvert serve`."
            )
        layout = cls.served.layout(spec.dtype, cls.ranks)
        same = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
        packed = {"num_head_slots": 1, "state_content_bytes": layout.block_bytes, "tokens_per_state": PAGE_SIZE}
        return LowBitSpec(**same | packed, blocks_ahead=layout.blocks_ahead, sink_blocks=layout.first_page)


@dataclass
class LowBitMetadata(AttentionMetadata):
    """A pass.

    Attributes:
        plan: of every layer.
        num_actual_tokens: without those that vLLM pads with.
        prompts: of the pass, see `divide_prompts`.
        tables: of requests with one new token, where kernels run.
    """

    plan: StepPlan
    num_actual_tokens: int
    prompts: list[tuple[slice, PackedPrompts | Request]]
    tables: DecodeTables | None


class LowBitMetadataBuilder(AttentionMetadataBuilder[LowBitMetadata]):
    """Plans each pass once for all layers, from lengths that the host knows."""

    # Kernels of a pass of single tokens read tables in fixed places, which are written before it.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        served, ranks = served_bundle(vllm_config.model_config.model), vllm_config.parallel_config.tensor_parallel_size
        self.layout = served.layout(kv_cache_spec.dtype, ranks)
        self._tables: DecodeTables | None = None
        self._quantized: torch.Tensor | None = None
        self._known: list[LayerBlocks] = []
        self._alike: list[LayerBatch] = []
        self._packing: Packing | None = None
        # Requests with one new token come first.
        self._init_reorder_batch_threshold(1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LowBitMetadata:
        """The plan of the pass."""
        common = common_attn_metadata
        lengths = common.seq_lens_cpu_upper_bound
        if lengths is None:
            lengths = common.seq_lens
        plan = plan_step(
            self.layout,
            common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
            lengths[: common.num_reqs].tolist(),
            common.block_table_tensor,
            self._quantized_blocks(),
        )
        if any(plan.pending):
            quantize_pending(self._layers(), plan)
        plan.note_quantized()
        tables = self._decode_tables()
        if tables is not None:
            rows = range(common.num_reqs) if not plan.prompts else [request.row for request in plan.decodes]
            tokens = dict.fromkeys(rows, 0) | {request.row: request.tokens for request in plan.decodes}
            tables.write(common.block_table_tensor, list(tokens), list(tokens.values()))
        return LowBitMetadata(plan, common.num_actual_tokens, divide_prompts(plan, self._packing), tables)

    def _memory(self) -> torch.Tensor:
        """The blocks of the first layer."""
        return self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]].kv_cache

    def _decode_tables(self) -> DecodeTables | None:
        """Where kernels run, what those of single tokens follow, made when the cache is known."""
        if self._tables is None and runs_triton(self.device):
            config = self.vllm_config
            most = config.scheduler_config.max_num_seqs
            recorded = config.compilation_config.cudagraph_capture_sizes or []
            # A recorded pass may be padded to more rows than there are requests.
            rows = max(most, min((size for size in recorded if size >= most), default=most))
            pages = rows * -(-config.model_config.max_model_len // PAGE_SIZE)
            if not config.cache_config.enable_prefix_caching:
                # None is another request's.
                pages = min(pages, len(self._memory()))
            self._layers()
            self._tables = DecodeTables(self._known, rows, pages)
            reasons = [ragged.unsupported(b.cache.format, b.cache.dtype, self.device) for b in self._known]
            if not any(reasons):
                first = self._known[0].cache
                dims = first.format.keys.head_dim, first.format.values.head_dim
                flash = flash_attention(first.dtype, *dims, config.attention_config.flash_attn_version)
                self._packing = Packing(self._known[0], flash, LowBitBackend.workspace(self._known[0].words.device))
            context = config.compilation_config.static_forward_context
            heads = [context[name].impl.num_heads for name in self.layer_names]
            args = self._known, heads, self._tables, self._packing
            prepare(self.device, lambda: rehearse(*args), rehearse_products)
        return self._tables

    def _quantized_blocks(self) -> torch.Tensor | None:
        """Where requests share pages, which blocks hold quantized ones: uint8 [blocks]."""
        if not self.vllm_config.cache_config.enable_prefix_caching:
            return None
        memory = self._memory()
        if self._quantized is None or len(self._quantized) != len(memory):
            self._quantized = torch.zeros(len(memory), dtype=torch.uint8, device=memory.device)
        return self._quantized

    def _layers(self) -> list[LayerBatch]:
        """All layers, those whose pages are written together side by side."""
        context = self.vllm_config.compilation_config.static_forward_context
        blocks = [context[name].impl.blocks(context[name]) for name in self.layer_names]
        if blocks != self._known:
            self._known, self._alike = blocks, alike(blocks)
        return self._alike


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
        **others: Any,
    ):
        unserved = {
            "ALiBi slopes": alibi_slopes,
            "a sliding window": sliding_window,
            "a soft cap of its logits": logits_soft_cap,
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
        self.rank = get_tensor_model_parallel_rank()
        self._blocks: LayerBlocks | None = None

    def blocks(self, layer: Any) -> LayerBlocks | None:
        """The layer's blocks; None before vLLM has allocated them."""
        memory = layer.kv_cache
        if not memory.numel():
            return None
        known = self._blocks is not None and self._blocks.words.data_ptr() == memory.data_ptr()
        if not known or len(self._blocks.words) != len(memory):
            index = layer_index(layer.layer_name)
            cache = self.served.layer(index, memory.device, layer.dtype, self.rank, self.ranks)
            if runs_triton(memory.device):
                query = torch.empty(1, self.num_heads, 1, self.head_size, dtype=layer.dtype, device=memory.device)
                reason = unsupported(query, cache.format, layer.dtype)
                if reason is not None:
                    raise BundleError(f"This bundle cannot be served on a GPU ({reason}); use `kvconvert serve`.")
            self._blocks = LayerBlocks(cache, memory)
        return self._blocks

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
                LowBitBackend.workspace(query.device)
            return output.fill_(0)
        count = attn_metadata.num_actual_tokens
        step = LayerStep(
            self.blocks(layer), attn_metadata.plan, self.scale, attn_metadata.prompts, attn_metadata.tables
        )
        step.run(query[:count], key[:count], value[:count], output[:count])
        return output
