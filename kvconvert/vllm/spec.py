"""What vLLM's planner and scheduler know of the blocks: their bytes, and how many a request takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


class BlocksAheadManager(FullAttentionManager):
    """Gives each request the blocks that its full-precision tokens take besides those of its pages."""

    def _with_blocks_ahead(self, num_tokens: int) -> int:
        return num_tokens + self.kv_cache_spec.blocks_ahead * self.block_size

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """As vLLM's, for so many tokens and the blocks ahead."""
        return super().get_num_blocks_to_allocate(request_id, self._with_blocks_ahead(num_tokens), *args, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list:
        """As vLLM's, for so many tokens and the blocks ahead."""
        return super().allocate_new_blocks(request_id, self._with_blocks_ahead(num_tokens), num_tokens_main_model)


@dataclass(frozen=True, kw_only=True)
class LowBitSpec(FullAttentionSpec):
    """Blocks of quantized pages and of full-precision tokens, see `kvconvert/vllm/blocks.py`.

    Attributes:
        blocks_ahead: of each request, besides one for every 128 tokens.
    """

    blocks_ahead: int

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Entries of a request's row in the block table."""
        return super().max_num_blocks_per_req(vllm_config, max_len) + self.blocks_ahead

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the longest request."""
        return super().max_memory_usage_bytes(vllm_config) + self.blocks_ahead * self.page_size_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """The spec of a group of layers, which are all alike."""
        if any(spec != specs[0] for spec in specs):
            raise AssertionError("Layers of one group have blocks of different kinds.")
        return specs[0]


# vLLM registers its own kinds when the first is asked for, but not once there is any.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(LowBitSpec, BlocksAheadManager, uniform_type_base_spec=FullAttentionSpec)
