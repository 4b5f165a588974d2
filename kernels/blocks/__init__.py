"""Pages and full-precision tokens in blocks of one size, which each sequence finds by its row of a block table.

`kvconvert/vllm/blocks.py` says what lies where. Offsets are in units of 16 bytes and count from the first block of a
layer, so that one table serves all layers whose records have the same sizes. For devices that run Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconvert.kernels.blocks.tables import ROW, BlockGeometry, DecodePlaces, geometry_table
from kvconvert.kernels.launches import deferred

if TYPE_CHECKING:
    from kvconvert.kernels.blocks.triton import copy_tokens, locate
else:
    copy_tokens, locate = deferred("blocks.triton", "copy_tokens", "locate")
