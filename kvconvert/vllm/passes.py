"""One plan of a pass for all layers that find their tokens alike, though vLLM asks once for each size of blocks.

On GPUs of Hopper's vLLM's FlashAttention 3 attends in prompts, over the workspace of a pass, where it is the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata

from kvconvert.kernels import ragged
from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.vllm.attention import begin, prepare, rehearse
from kvconvert.vllm.blocks import LayerBlocks
from kvconvert.vllm.prompts import WORKSPACE_BYTES, Flash, PackedPrompts, Packing, Workspace, divide_prompts
from kvconvert.vllm.step import DecodeTables, Request, StepPlan, plan_step
from kvconvert.vllm.weights import rehearse_products


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


class PassPlanner:
    """What the layers of one group share whose heads, windows, and sink tokens are the same.

    Args:
        config: vLLM's.
        layers: the first of them.
    """

    # The planner of the newest pass. All builders of a group are given the same object for a pass.
    newest: ClassVar[PassPlanner | None] = None
    _workspace: ClassVar[Workspace | None] = None

    def __init__(self, config: VllmConfig, layers: list[LayerBlocks]):
        self.config, self.like = config, layers[0]
        self._common: CommonAttentionMetadata | None = None
        self._metadata: LowBitMetadata | None = None
        self._quantized: torch.Tensor | None = None
        self._tables: DecodeTables | None = None
        self._packing: Packing | None = None
        if runs_triton(self.like.words.device):
            self._tables = DecodeTables(layers, *self._most())
            if _packs(layers):
                first = self.like
                dims = first.format.keys.head_dim, first.format.values.head_dim
                flash = flash_attention(first.dtype, *dims, config.attention_config.flash_attn_version)
                self._packing = Packing(self.like, flash, self.workspace(self.like.words.device))

    @classmethod
    def of(cls, config: VllmConfig, layers: list[LayerBlocks], common: CommonAttentionMetadata) -> PassPlanner:
        """The planner of layers that another builder has given this pass to before, if it serves these; else a new one.

        Args:
            config: vLLM's.
            layers: a builder's layers.
            common: of the pass.
        """
        known = cls.newest
        if known is None or known._common is not common or not known._serves(layers):
            return cls(config, layers)
        return known

    @classmethod
    def workspace(cls, device: torch.device) -> Workspace:
        """Memory for prompts, reserved once and before vLLM gives the rest to the cache."""
        if cls._workspace is None or cls._workspace.memory.device != device:
            cls._workspace = Workspace(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device))
        return cls._workspace

    @classmethod
    def _finish(cls) -> None:
        """Store what the pass before has left in the workspace, which this one reads."""
        if cls._workspace is not None:
            cls._workspace.finish()

    @property
    def is_new(self) -> bool:
        """Whether it has planned nothing yet."""
        return self._metadata is None

    def _serves(self, layers: list[LayerBlocks]) -> bool:
        same = len({_tokens_of(blocks) for blocks in (self.like, *layers)}) == 1
        return same and (self._tables is None or _packs(layers) == (self._packing is not None))

    def _most(self) -> tuple[int, int]:
        """Requests of a pass, and pages of all of them, at most."""
        config = self.config
        most = config.scheduler_config.max_num_seqs
        recorded = config.compilation_config.cudagraph_capture_sizes or []
        # A recorded pass may be padded to more rows than there are requests.
        rows = max(most, min((size for size in recorded if size >= most), default=most))
        pages = rows * -(-config.model_config.max_model_len // PAGE_SIZE)
        if not config.cache_config.enable_prefix_caching:
            # None is another request's.
            pages = min(pages, len(self.like.words))
        return rows, pages

    def rehearse(self, layers: list[LayerBlocks], heads: list[tuple[int, Scoring]], ahead: bool = False) -> None:
        """Compile what those of these layers launch that it serves, all side by side, and describe their blocks.

        Args:
            layers: the model's layers.
            heads: of each, see `rehearse`.
            ahead: only begin to compile.
        """
        if self._tables is None:
            return
        self._finish()
        own = [(blocks, own) for blocks, own in zip(layers, heads, strict=True) if self._serves([blocks])]
        served, heads = zip(*own, strict=True)
        self._tables.include(served)
        args = served, heads, self._tables, self._packing
        (begin if ahead else prepare)(self.like.words.device, lambda: rehearse(*args), rehearse_products)

    @classmethod
    def begin(cls, config: VllmConfig, layers: list[LayerBlocks], heads: list[tuple[int, Scoring]]) -> None:
        """Begin to compile what passes will launch; `layers` are stand-ins, other arguments as for `rehearse`."""
        left = list(layers)
        while left:
            planner = cls(config, left[:1])
            planner.rehearse(layers, heads, ahead=True)
            left = [blocks for blocks in left if not planner._serves([blocks])]

    def plan(self, common: CommonAttentionMetadata) -> LowBitMetadata:
        """The plan of a pass, made when the first builder asks for it."""
        if self._metadata is None or self._common is not common:
            self._finish()
            lengths = common.seq_lens_cpu_upper_bound
            if lengths is None:
                lengths = common.seq_lens
            plan = plan_step(
                self.like.layout,
                common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
                lengths[: common.num_reqs].tolist(),
                common.block_table_tensor,
                self._quantized_blocks(),
                None if common.is_prefilling is None else common.is_prefilling.tolist(),
            )
            # Known before this pass's pages are noted.
            plan.pending  # noqa: B018
            plan.note_quantized()
            self._write(common, plan)
            prompts = divide_prompts(plan, self._packing)
            self._common = common
            self._metadata = LowBitMetadata(plan, common.num_actual_tokens, prompts, self._tables)
        PassPlanner.newest = self
        return self._metadata

    def _write(self, common: CommonAttentionMetadata, plan: StepPlan) -> None:
        if self._tables is not None:
            rows = range(common.num_reqs) if not plan.prompts else [request.row for request in plan.decodes]
            known = {request.row: request for request in plan.decodes}
            tokens = [known[row].tokens if row in known else 0 for row in rows]
            recent = [row not in known or known[row].recent for row in rows]
            self._tables.write(common.block_table_tensor, rows, tokens, recent)

    def _quantized_blocks(self) -> torch.Tensor | None:
        """Where requests share pages, which blocks hold quantized ones: uint8 [blocks]."""
        if not self.config.cache_config.enable_prefix_caching:
            return None
        words = self.like.words
        if self._quantized is None or len(self._quantized) != len(words):
            self._quantized = torch.zeros(len(words), dtype=torch.uint8, device=words.device)
        return self._quantized


def _tokens_of(blocks: LayerBlocks) -> tuple[object, ...]:
    """What decides how a layer's tokens are found."""
    f, layout = blocks.format, blocks.layout
    heads = f.keys.heads, f.keys.head_dim, f.values.head_dim
    windows = layout.sink_tokens, layout.key_window, layout.value_window
    return *heads, blocks.dtype, *windows, layout.first_page, len(blocks.words)


def _packs(layers: list[LayerBlocks]) -> bool:
    """Whether `kernels/ragged` serves prompts in all of these."""
    return not any(ragged.unsupported(b.format, b.dtype, b.words.device) for b in layers)


VERSION = 3


def flash_attention(dtype: torch.dtype, head_dim: int, value_dim: int, version: int | None = None) -> Flash | None:
    """What attends in prompts instead of our kernel; None where vLLM would not take FlashAttention 3 for such heads.

    Args:
        dtype: of queries, keys, and values.
        head_dim, value_dim: channels of keys and of values.
        version: what vLLM's setting `flash_attn_version` says.
    """
    if not current_platform.is_cuda() or dtype == torch.float32 or head_dim != value_dim:
        return None
    if version not in (None, VERSION):
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    if get_flash_attn_version(head_size=head_dim) != VERSION:
        return None

    def attend(
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        most_queries: int,
        most_keys: int,
        scaling: float,
        output: torch.Tensor,
    ) -> None:
        flash_attn_varlen_func(
            queries, keys, values, most_queries, query_ends, most_keys, key_ends, softmax_scale=scaling, causal=True,
            out=output, fa_version=VERSION,
        )  # fmt: skip

    return attend
