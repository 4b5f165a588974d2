"""Error feedback when keys are rounded: what one channel loses is made up for by the channels still to come.

Attention reads a key k only through products with queries, so that of its rounding error counts

    E_q ((k - k_hat) q)^2 = (k - k_hat) H (k - k_hat)^T        H = E[q^T q], q and k being row vectors

With H^-1 = U^T U (U upper triangular) the best later channels, given the error e_i of channel i, are lower by
e_i U_ij / U_ii. So channels are rounded in their order, and each error is subtracted from later channels before these
are rounded: LDLQ (QuIP, arXiv 2307.13304, section 3), which is GPTQ's update (arXiv 2210.17323, equation 2), there for
weights. Scales and offsets are those of the unmodified keys, and what is stored has the same form.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Channels whose errors reach later ones by one product of matrices.
BLOCK = 16


def round_with_feedback_reference(
    keys: Tensor, scale: Tensor, offset: Tensor, largest: Tensor | int, feedback: Tensor
) -> Tensor:
    """Codes of keys whose channels are rounded one after another.

    Args:
        keys: [N, H, D, P], P tokens of N pages as the quantizer gets them (divided by their norms).
        scale, offset: float16 [N, H, D, groups], of the unmodified keys; consecutive tokens make a group.
        largest: the largest code, for all channels or int [N, H, D].
        feedback: [H, D, D], upper triangular with a diagonal of ones: U_ij / U_ii.

    Returns:
        uint8 [N, H, D, P].
    """
    w = keys.float().clone()
    step, zero = (part.float().repeat_interleave(w.shape[3] // part.shape[3], 3) for part in (scale, offset))
    largest = torch.as_tensor(largest, device=w.device).expand(w.shape[:3]).unsqueeze(3)
    factors = feedback.float()
    codes = torch.empty_like(w, dtype=torch.uint8)
    for i in range(w.shape[2]):
        # Dividing by infinity makes every code of a zero scale 0.
        divisor = step[:, :, i].masked_fill(step[:, :, i] == 0, torch.inf)
        code = ((w[:, :, i] - zero[:, :, i]) / divisor).round().clamp(min=0).minimum(largest[:, :, i])
        error = w[:, :, i] - (code * step[:, :, i] + zero[:, :, i])
        w[:, :, i + 1 :] -= factors[:, i, i + 1 :].unsqueeze(2) * error.unsqueeze(2)
        codes[:, :, i] = code.to(torch.uint8)
    return codes


def round_with_feedback(keys: Tensor, scale: Tensor, offset: Tensor, largest: Tensor | int, feedback: Tensor) -> Tensor:
    """`round_with_feedback_reference` for many pages at once, in blocks of channels.

    Sums are taken in another order, so that a number halfway between two codes may be rounded the other way.
    """
    count, heads, dim, tokens = keys.shape
    groups = scale.shape[3]
    # [H, D, N, groups, tokens of a group]: the numbers of one channel lie side by side.
    w = keys.permute(1, 2, 0, 3).unflatten(3, (groups, tokens // groups))
    w = w.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    step, zero = (part.permute(1, 2, 0, 3).float().contiguous().unsqueeze(4) for part in (scale, offset))
    divisor = step.masked_fill(step == 0, torch.inf)
    if isinstance(largest, Tensor):
        largest = largest.permute(1, 2, 0).to(w)[..., None, None].contiguous()
    factors = feedback.float()
    near = factors[..., None, None, None]
    codes = torch.empty_like(w, dtype=torch.uint8)
    # Views of all channels at once: on a GPU the host's calls are what takes time here.
    ws, zeros, divisors, steps, rounded = (part.unbind(1) for part in (w, zero, divisor, step, codes))
    for first in range(0, dim, BLOCK):
        stop = min(first + BLOCK, dim)
        errors = w.new_empty(heads, stop - first, count, groups, tokens // groups)
        for i, into in zip(range(first, stop), errors.unbind(1), strict=True):
            code = (ws[i] - zeros[i]).div_(divisors[i]).round_()
            code.clamp_(0, largest) if isinstance(largest, int) else code.clamp_(min=0).clamp_(max=largest[:, i])
            torch.sub(ws[i], torch.addcmul(zeros[i], code, steps[i]), out=into)
            if i + 1 < stop:
                w[:, i + 1 : stop].addcmul_(near[:, i, i + 1 : stop], into.unsqueeze(1), value=-1)
            rounded[i].copy_(code)
        if stop < dim:
            far = factors[:, first:stop, stop:].transpose(1, 2)
            w[:, stop:].view(heads, dim - stop, -1).baddbmm_(far, errors.flatten(2), alpha=-1)
    return codes.flatten(3).permute(2, 0, 1, 3)
