"""What vLLM's planner and scheduler know of the blocks: their bytes, and how many a request takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from kvconvert.kernels.pages import PAGE_SIZE


class BlocksAheadManager(FullAttentionManager):
    """Gives each request the blocks that its full-precision tokens take besides those of its pages.

    A prefix that is found in the cache are whole pages, and the blocks of the sink tokens before them, which are known
    by the hash of the first page. Pages are shared once a pass has quantized them, which is one pass after their last
    token was scheduled.
    """

    def _with_blocks_ahead(self, num_tokens: int) -> int:
        return num_tokens + self.kv_cache_spec.pages_ahead * PAGE_SIZE

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """As vLLM's, for so many tokens and the blocks ahead."""
        return super().get_num_blocks_to_allocate(request_id, self._with_blocks_ahead(num_tokens), *args, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list:
        """As vLLM's, for so many tokens and the blocks ahead."""
        return super().allocate_new_blocks(request_id, self._with_blocks_ahead(num_tokens), num_tokens_main_model)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], block_pool: Any, kv_cache_spec: Any,
        *args: Any, **kwargs: Any,
    ) -> tuple[tuple[list, ...], int]:  # fmt: skip
        """As vLLM's, with the blocks of the sink tokens first, without which there is no hit."""
        found, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
        )
        if not length:
            return found, length
        own = block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size
        sinks = [block_pool.get_cached_block(h, kv_cache_group_ids) for h in _sink_hashes(*own, kv_cache_spec)]
        if not all(sinks):
            return tuple([] for _ in found), 0
        return tuple([*(at[i] for at in sinks), *pages] for i, pages in enumerate(found)), length

    def add_local_computed_blocks(self, request_id: str, new_computed_blocks: Sequence, *args: Any) -> None:
        """As vLLM's, which counts pages alone."""
        super().add_local_computed_blocks(request_id, new_computed_blocks, *args)
        self.num_cached_block[request_id] -= self.kv_cache_spec.sink_pages if new_computed_blocks else 0

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Let requests share the pages that are quantized, whatever this step does with the newest."""
        spec, size = self.kv_cache_spec, self.block_size
        cached = self.num_cached_block.get(request.request_id, 0)
        sealed = min(max(0, request.num_computed_tokens - 1), num_tokens) // size
        if sealed <= cached:
            return
        blocks = self.req_to_blocks[request.request_id]
        self.block_pool.cache_full_blocks(
            request, blocks[spec.sink_pages :], cached, sealed, size, self.kv_cache_group_id
        )
        if not cached:
            hashes = _sink_hashes(request.block_hashes, self.block_pool.hash_block_size, size, spec)
            for block, block_hash in zip(blocks, hashes, strict=False):
                key = make_block_hash_with_group_id(block_hash, self.kv_cache_group_id)
                self.block_pool._insert_block_hash(key, block, num_tokens=None)
        self.num_cached_block[request.request_id] = sealed


def _sink_hashes(block_hashes: Any, hash_block_size: int, block_size: int, spec: LowBitSpec) -> list[BlockHash]:
    """Of the blocks of sink tokens before a page whose hashes these are."""
    first = resolve_block_hashes(block_hashes, hash_block_size, block_size)[0]
    return [BlockHash(first + b"sinks" + bytes([number])) for number in range(spec.sink_pages)]


@dataclass(frozen=True, kw_only=True)
class LowBitSpec(FullAttentionSpec):
    """Blocks of quantized pages and of full-precision tokens, see `kvconvert/vllm/blocks.py`.

    Attributes:
        pages_ahead: of each request, besides one for every 128 tokens.
        sink_pages: of these, those of sink tokens, which are the first of its row.
    """

    pages_ahead: int
    sink_pages: int

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Entries of a request's row in the block table."""
        return super().max_num_blocks_per_req(vllm_config, max_len + self.pages_ahead * PAGE_SIZE)

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
KVCacheSpecRegistry.register(LowBitSpec, BlocksAheadManager)
