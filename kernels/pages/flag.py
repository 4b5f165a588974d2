"""How kernels report numbers that cannot be quantized: a flag on the device, read once per flush."""

from __future__ import annotations

import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.quantizer import GroupRangeError

NOT_FLAGGED = 2**31 - 1


def new_flag(device: torch.device) -> torch.Tensor:
    """A flag that nothing has raised: int32 [1]."""
    return torch.full((1,), NOT_FLAGGED, dtype=torch.int32, device=device)


def raise_if_flagged(flag: torch.Tensor | int, heads: int, of_span: bool = False) -> None:
    """Wait for the kernels that were given `flag`, and raise what they found; the flag is lowered again.

    The number that was read from a flag may take its place; whoever read it gives up the flag itself.

    Raises:
        GroupRangeError: NaN, infinity, or a scale or zero point beyond float16; `index` is (page, head), the page
            counted in its launch, and (head,) of a span.
        NumericError: the norm of a key token is not finite or does not fit float16.
    """
    found = int(flag)
    if found == NOT_FLAGGED:
        return
    if isinstance(flag, torch.Tensor):
        flag.fill_(NOT_FLAGGED)
    place, is_group = divmod(found, 2)
    if not is_group:
        raise NumericError("the norm of a key token is not finite or exceeds float16")
    page, head = divmod(place, heads)
    raise GroupRangeError(
        f"{'The span' if of_span else f'Page {page}'} of head {head} cannot be quantized because it holds NaN, "
        "infinity, or a range that fp16 scales and zero points cannot describe; look for the cause where the numbers "
        "arose.",
        (head,) if of_span else (page, head),
    )
