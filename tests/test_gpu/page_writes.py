"""Pages quantized as the cache has them quantized: by addresses."""

import numpy as np
import torch

from kvconvert.kernels.pages import PageTensors, PageWrites, SideTensors, new_flag, quantize_at, raise_if_flagged


def page_writes(
    tokens: list[torch.Tensor], pages: list[PageTensors], layers: int = 1, hidden: list[int] | None = None
) -> PageWrites:
    """Where the tokens [H, n P, channels] of n pages each lie and the records of the pages, in the same order, layer
    after layer; and how many of each page's first tokens are hidden.
    """
    size = pages[0].format.page_size
    each = [page for part in tokens for page in part.split(size, 1)]
    records = [record for view in pages for record in view.buffer]
    places = [page.data_ptr() for page in each], [page.stride(0) for page in each], [r.data_ptr() for r in records]
    count = len(each) // layers
    of_layers = (np.array(line).reshape(layers, count) for line in places)
    return PageWrites(*of_layers, np.zeros(count, np.int64), np.array(hidden or [0] * count))


def store_pages(
    tokens: list[torch.Tensor],
    pages: list[PageTensors],
    channels: torch.Tensor | None = None,
    static: tuple[torch.Tensor, torch.Tensor] | None = None,
    feedback: list[torch.Tensor] | None = None,
    hidden: list[int] | None = None,
) -> None:
    """Quantize tokens [H, n P, channels] into pages, in one launch, and raise what it found.

    Those of several matrices [H, D, D] are of as many layers.
    """
    flag, layers = new_flag(tokens[0].device), [SideTensors(channels, static, own) for own in feedback or [None]]
    writes = page_writes(tokens, pages, len(layers), hidden)
    quantize_at(writes, tokens[0], pages[0].buffer, pages[0].format, flag, layers)
    raise_if_flagged(flag, tokens[0].shape[0])
