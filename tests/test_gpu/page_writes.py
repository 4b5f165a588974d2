"""Pages quantized as the cache has them quantized: by addresses."""

import numpy as np
import torch

from kvconvert.kernels.pages import PageTensors, PageWrites, new_flag, quantize_at, raise_if_flagged


def page_writes(
    tokens: list[torch.Tensor],
    pages: list[PageTensors] | list[PageTensors],
    feedback: list[torch.Tensor] | None = None,
    hidden: list[int] | None = None,
) -> PageWrites:
    """Where the tokens [H, n P, channels] of n pages each lie and the records of the pages, in the same order; the
    matrices [H, D, D] of all pages, or one for all; and how many of each page's first tokens are hidden.
    """
    size = pages[0].format.page_size
    each = [page for part in tokens for page in part.split(size, 1)]
    records = [record for view in pages for record in view.buffer]
    matrices = None
    if feedback is not None:
        matrices = np.array([matrix.data_ptr() for matrix in feedback])
        matrices = np.repeat(matrices, len(each) // len(matrices))
    return PageWrites(
        np.array([page.data_ptr() for page in each]),
        np.array([page.stride(0) for page in each]),
        np.array([record.data_ptr() for record in records]),
        matrices,
        hidden=None if hidden is None else np.array(hidden),
    )


def store_pages(
    tokens: list[torch.Tensor],
    pages: list[PageTensors] | list[PageTensors],
    channels: torch.Tensor | None = None,
    static: tuple[torch.Tensor, torch.Tensor] | None = None,
    feedback: list[torch.Tensor] | None = None,
    hidden: list[int] | None = None,
) -> None:
    """Quantize tokens [H, n P, channels] into pages, in one launch, and raise what it found."""
    flag = new_flag(tokens[0].device)
    quantize_at(page_writes(tokens, pages, feedback, hidden), tokens[0], pages[0], flag, channels, static)
    raise_if_flagged(flag, tokens[0].shape[0])
