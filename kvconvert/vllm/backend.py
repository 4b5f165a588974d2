"""The attention backend: vLLM's view of the low-bit cache, of its blocks' bytes, and of how many a request takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported, register_top_k_top_p_warmups

from kvconvert.errors import BundleError
from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.decode import unsupported
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.pages import PAGE_SIZE, LayerFormat
from kvconvert.vllm.attention import STAND_INS, LayerStep, quantize_pending, stand_ins
from kvconvert.vllm.blocks import BlockLayout, LayerBatch, LayerBlocks, alike
from kvconvert.vllm.bundle import MODEL_DRAFTS, ServedBundle, layer_index, served_bundle
from kvconvert.vllm.passes import LowBitMetadata, PassPlanner


class LowBitBackend(AttentionBackend):
    """Blocks of 128 tokens whose bytes are a bundle's pages."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    # The one bundle of this process, once its first layer is built, among how many ranks its heads are divided, and
    # whether ranks have different layers. How many tokens may be drafted at a time, and whether by layers with a cache.
    served: ClassVar[ServedBundle | None] = None
    ranks: ClassVar[int] = 1
    in_stages: ClassVar[bool] = False
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
        """All layers' blocks with one number side by side where their slots are shared; beside layers of another
        backend, whose pages have other sizes, too, if that backend can read them so. vLLM's for CPUs cannot.
        """
        if cls.served is None:
            return None
        side_by_side = KVCacheLayout.BLNHC, KVCacheLayout.BLHNC
        if any(layout.is_shared for layout in cls._layouts(torch.bfloat16).values()):
            return side_by_side
        return (*side_by_side, KVCacheLayout.LBHNC) if cls.served.has_windows or cls.drafts_by_model else None

    @classmethod
    def _layouts(cls, dtype: torch.dtype) -> dict[int, BlockLayout]:
        return cls.served.layouts(dtype, *cls.division())

    @classmethod
    def division(cls) -> tuple[int, int, bool]:
        """`ServedBundle.layouts`'s ranks, drafts, and apart."""
        return cls.ranks, cls.drafts, cls.drafts_by_model or cls.in_stages

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The bytes of a token, for a block of one token that vLLM aligns states with; layers have theirs by `spec`."""
        if isinstance(spec, LowBitSpec) or cls.served is None:
            return spec
        if spec.block_size > 1:
            raise _unserved("a layer", spec)
        most = max(-(-layout.block_bytes // PAGE_SIZE) for layout in cls._layouts(spec.dtype).values())
        return replace(spec, num_head_slots=1, state_content_bytes=most)

    @classmethod
    def spec(cls, layer_name: str, spec: AttentionSpec) -> LowBitSpec:
        """The blocks of an attention layer, each one record of a page's bytes.

        Raises:
            BundleError: the layer does not attend to all tokens.
        """
        layouts = {} if cls.served is None else cls._layouts(spec.dtype)
        layout = layouts.get(layer_index(layer_name))
        if layout is None or not isinstance(spec, FullAttentionSpec):
            raise _unserved(layer_name, spec)
        same = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
        packed = {"num_head_slots": 1, "state_content_bytes": layout.block_bytes, "tokens_per_state": PAGE_SIZE}
        # Beside states blocks have the size that vLLM has chosen, several pages.
        packed["block_size"] = spec.block_size if cls.served.has_states else PAGE_SIZE
        recent = max(max(each.key_window, each.value_window) for each in layouts.values())
        first = {"sink_pages": layout.sink_blocks, "token_pages": layout.token_blocks, "recent_tokens": recent}
        return LowBitSpec(**same | packed | first)

    @classmethod
    def begin_to_compile(cls, config: VllmConfig) -> None:
        """Begin to compile kernels, once for all layers, before vLLM compiles its own and there is a cache."""
        device = torch.empty(0, device=config.device_config.device_type).device
        if cls.has_begun or not runs_triton(device):
            return
        cls.has_begun = True
        layers = _layers_of(config)
        caches = [layer.impl.cache(layer, device) for layer in layers]
        memory = stand_ins([layout for _, layout in caches], STAND_INS, device)
        blocks = [LayerBlocks(*c, layer.dtype, m) for layer, c, m in zip(layers, caches, memory, strict=True)]
        PassPlanner.begin(config, blocks, [(layer.impl.num_heads, layer.impl.scoring) for layer in layers])


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
        if current_platform.is_cuda() and not flashinfer_sampler_supported():
            # vLLM compiles these at the start for drafts alone, and samples with them where there is no FlashInfer.
            register_top_k_top_p_warmups()

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
                self._planner.rehearse(blocks, [(layer.impl.num_heads, layer.impl.scoring) for layer in every])
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
        LowBitBackend.ranks = config.parallel_config.tensor_parallel_size
        LowBitBackend.drafts, drafts = config.num_speculative_tokens, config.speculative_config
        LowBitBackend.drafts_by_model = drafts is not None and drafts.method in MODEL_DRAFTS
        LowBitBackend.in_stages = config.parallel_config.pipeline_parallel_size > 1
        self.rank = get_tensor_model_parallel_rank()
        self._sinks, self.scoring = sinks, Scoring(scale, logits_soft_cap or None)
        self._memory: torch.Tensor | None = None
        self._blocks: LayerBlocks | None = None

    def blocks(self, layer: Any) -> LayerBlocks | None:
        """The layer's blocks; None before vLLM has allocated them."""
        memory = layer.kv_cache
        # Every pass asks for those of all layers.
        if memory is self._memory:
            return self._blocks
        if not memory.numel():
            return None
        self._memory = memory
        known = self._blocks is not None and self._blocks.words.data_ptr() == memory.data_ptr()
        if not known or len(self._blocks.words) != len(memory):
            self._blocks = LayerBlocks(*self.cache(layer, memory.device), layer.dtype, memory)
        return self._blocks

    def cache(self, layer: Any, device: torch.device) -> tuple[LayerFormat, BlockLayout]:
        """The layer's format, and the layout of its blocks."""
        index = layer_index(layer.layer_name)
        found = self.served.layer(index, device, layer.dtype, self.rank, *LowBitBackend.division())
        if runs_triton(device):
            query = torch.empty(1, self.num_heads, 1, self.head_size, dtype=layer.dtype, device=device)
            reason = unsupported(query, found[0], layer.dtype)
            if reason is not None:
                raise BundleError(f"This bundle cannot be served on a GPU ({reason}); use `kvconvert serve`.")
        # Loaded by now; a copy in fixed places, which CUDA graphs may hold.
        sinks = None if self._sinks is None else self._sinks.detach().float().contiguous()
        self.scoring = self.scoring._replace(sink_logits=sinks)
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
        step = LayerStep(blocks, pass_.plan, self.scoring, pass_.prompts, pass_.tables)
        step.run(query[:count], key[:count], value[:count], output[:count])
        return output


class TokenBlocksManager(FullAttentionManager):
    """Gives each request the blocks that its full-precision tokens take before those of its pages.

    A prefix that is found in the cache are whole pages, and the blocks of the sink tokens before them, which are known
    by the hash of the first page; between them are blocks of the request's own. It ends before the recent tokens of the
    prompt, which are read again, so that the answer has them in full precision. Pages are shared once a pass has
    quantized them, which is one pass after their last token was scheduled.
    """

    supports_fine_grained_hash_lookup: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Requests whose pages were found, and that have no blocks for full-precision tokens yet.
        self._without_tokens: set[str] = set()

    def _with_first_pages(self, num_tokens: int) -> int:
        return num_tokens + self.kv_cache_spec.first_page * PAGE_SIZE

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """As vLLM's, for this number of tokens and the blocks before the pages."""
        return super().get_num_blocks_to_allocate(request_id, self._with_first_pages(num_tokens), *args, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list:
        """As vLLM's, for this number of tokens and the blocks before the pages."""
        own = []
        if request_id in self._without_tokens:
            self._without_tokens.remove(request_id)
            first = self.kv_cache_spec.sink_pages
            own = self.block_pool.get_new_blocks(self.kv_cache_spec.token_pages)
            self.req_to_blocks[request_id][first:first] = own
            if self._record_new_block_ids:
                self.new_block_ids.extend(block.block_id for block in own)
        more = super().allocate_new_blocks(request_id, self._with_first_pages(num_tokens), num_tokens_main_model)
        return own + more

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], block_pool: Any, kv_cache_spec: Any,
        *args: Any, **kwargs: Any,
    ) -> tuple[tuple[list, ...], int]:  # fmt: skip
        """As vLLM's before the recent tokens; there is no hit without the blocks of the sink tokens."""
        most = max(0, max_length - kv_cache_spec.recent_tokens)
        found, length = super().find_longest_cache_hit(
            block_hashes, most, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
        )
        if not length:
            return found, length
        first = resolve_block_hashes(block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size)[0]
        hashes = _sink_hashes(first, kv_cache_spec)
        if all(block_pool.get_cached_block(each, kv_cache_group_ids) for each in hashes):
            return found, length
        return tuple([] for _ in found), 0

    def add_local_computed_blocks(self, request_id: str, new_computed_blocks: Sequence, *args: Any) -> None:
        """As vLLM's, behind the blocks of the sink tokens, which do not count."""
        sinks: list = []
        if new_computed_blocks:
            hashes = _sink_hashes(get_block_hash(new_computed_blocks[0].block_hash), self.kv_cache_spec)
            own = [self.kv_cache_group_id]
            sinks = [block for each in hashes for block in self.block_pool.get_cached_block(each, own)]
            self._without_tokens.add(request_id)
        super().add_local_computed_blocks(request_id, [*sinks, *new_computed_blocks], *args)
        self.num_cached_block[request_id] -= len(sinks)

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Let requests share the pages that are quantized, whatever this step does with the newest."""
        spec, size = self.kv_cache_spec, self.block_size
        if spec.recent_tokens:
            # Tokens of an answer are not what reading them makes of them, which sees recent tokens as quantized. An
            # interrupted request reads its own, and passes do not know these from others: it begins anew.
            num_tokens = min(num_tokens, request.num_prompt_tokens)
            request.skip_reading_prefix_cache |= request.num_computed_tokens >= request.num_prompt_tokens
        cached = self.num_cached_block.get(request.request_id, 0)
        hashed = len(request.block_hashes) * self.block_pool.hash_block_size
        sealed = min(max(0, request.num_computed_tokens - 1), num_tokens, hashed) // size
        if sealed <= cached:
            return
        blocks = self.req_to_blocks[request.request_id]
        self.block_pool.cache_full_blocks(
            request, blocks[spec.first_page :], cached, sealed, size, self.kv_cache_group_id
        )
        if not cached:
            first = resolve_block_hashes(request.block_hashes, self.block_pool.hash_block_size, size)[0]
            for block, block_hash in zip(blocks, _sink_hashes(first, spec), strict=False):
                key = make_block_hash_with_group_id(block_hash, self.kv_cache_group_id)
                self.block_pool._insert_block_hash(key, block, num_tokens=None)
        self.num_cached_block[request.request_id] = sealed


def _sink_hashes(first: BlockHash, spec: LowBitSpec) -> list[BlockHash]:
    """Of the blocks of sink tokens before a first page with this hash."""
    return [BlockHash(first + b"sinks" + bytes([number])) for number in range(spec.sink_pages)]


@dataclass(frozen=True, kw_only=True)
class LowBitSpec(FullAttentionSpec):
    """Blocks of quantized pages and of full-precision tokens, see `kvconvert/vllm/blocks.py`.

    Attributes:
        sink_pages, token_pages: blocks of each request that hold its sink tokens, which are the first of its row, and
            its other full-precision tokens, which are the next, besides one for every 128 tokens.
        recent_tokens: newest tokens that stay in full precision besides those of an incomplete page.
    """

    sink_pages: int
    token_pages: int
    recent_tokens: int

    @property
    def first_page(self) -> int:
        """The entry of a request's first page in its row."""
        return self.sink_pages + self.token_pages

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Entries of a request's row in the block table."""
        return super().max_num_blocks_per_req(vllm_config, max_len + self.first_page * PAGE_SIZE)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the longest request."""
        most = vllm_config.model_config.max_model_len
        return self.max_num_blocks_per_req(vllm_config, most) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """The spec of a group of layers, which are all alike."""
        if any(spec != specs[0] for spec in specs):
            raise AssertionError("Layers of one group have blocks of different kinds.")
        return specs[0]


# vLLM registers its own kinds when the first is asked for, but not once there is any.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(LowBitSpec, TokenBlocksManager)
