"""What the constant part of keys adds to the scores of a step, for all quantized key pages, before they are read.

With q M = [a, b] for the F frequencies w, and t the position of a page's first token, token j of the page gets

    q . c(t + j) = (a cos(t w) + b sin(t w)) . cos(j w) + (b cos(t w) - a sin(t w)) . sin(j w)

(`kernels/pages/center.py`): the queries are turned back once per page, and multiplied with a table that all pages
share. The decode kernel has one warp per program and no room for the table; so a kernel of its own, whose programs
hold it, takes several pages for the rows of one product, and leaves the results in a workspace, in the order in which
the decode kernel has its scores. Pages of all sequences are divided evenly among a fixed number of programs, which find
on the device how many there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvconvert.kernels.decode.stored import PageTables
from kvconvert.kernels.decode.triton.queries import power_above
from kvconvert.kernels.decode.triton.scores import product_factor
from kvconvert.kernels.decode.triton.shape import DecodeShape, block_of, key_lanes, query_rows
from kvconvert.kernels.decode.triton.tiles import PAGE
from kvconvert.kernels.device import capability, multiprocessors
from kvconvert.kernels.pages.formats import PAGE_SIZE

# Columns of `PageTables.key_rows`.
KEY_ROW = tl.constexpr(4)
FEWEST_ROWS = tl.constexpr(16)
# Channels of queries that are multiplied at a time: bounds shared memory.
CHANNELS = tl.constexpr(64)
# 2 pi in fp32, and what it is less than that.
TURN = tl.constexpr(6.2831854820251465)
TURN_REST = tl.constexpr(-1.7484556000744883e-07)
PROGRAMS_PER_MULTIPROCESSOR = 2
# Loads in advance would take more shared memory than there is.
STAGES = 1


@triton.jit
def product(left, right, total, F: tl.constexpr):
    """`total` plus a product of fp16 numbers, or of fp32 ones where queries are of that dtype."""
    if F.split_query:
        return tl.dot(left, right.to(tl.float32), total, input_precision="tf32x3")
    else:
        return tl.dot(left.to(tl.float16), right.to(tl.float16), total)


@triton.jit
def for_every_row(x, PAGES: tl.constexpr, ROWS: tl.constexpr):
    """[PAGES, K] to [PAGES * ROWS, K], each row as often as a page has query rows."""
    wide = tl.broadcast_to(x[:, None, :], [PAGES, ROWS, x.shape[1]])
    return tl.reshape(wide, [PAGES * ROWS, x.shape[1]])


@triton.jit
def for_every_page(x, M: tl.constexpr):
    """[N, K] to [M, K], all rows again and again."""
    wide = tl.broadcast_to(x[None, :, :], [M // x.shape[0], x.shape[0], x.shape[1]])
    return tl.reshape(wide, [M, x.shape[1]])


@triton.jit
def cos_and_sin(angle, F: tl.constexpr):
    """Both of any angle in fp32.

    Where results are rounded to fp16, to an error of 2^-20: the first step of the reduction by multiples of 2 pi is
    exact, and the hardware's instructions have that error between -pi and pi, and larger ones elsewhere.
    """
    if F.inline_asm and not F.split_query:
        turns = tl.floor(angle * (1.0 / TURN) + 0.5)
        angle = tl.fma(turns, -TURN, angle)
        angle = tl.fma(turns, -TURN_REST, angle)
        cos = tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $1;", "=r,r", [angle], dtype=tl.float32, is_pure=True, pack=1
        )
        sin = tl.inline_asm_elementwise(
            "sin.approx.f32 $0, $1;", "=r,r", [angle], dtype=tl.float32, is_pure=True, pack=1
        )
        return cos, sin
    else:
        return tl.cos(angle), tl.sin(angle)


@triton.jit
def step_features(steps, place, f, F: tl.constexpr):
    """cos(j w) and sin(j w), [F, N], of the tokens j at `place` [N] of a row of `rest`."""
    COUNT: tl.constexpr = F.key_dim // 2
    PLANES: tl.constexpr = PAGE // key_lanes(F)
    token = place % PLANES * key_lanes(F) + place // PLANES
    table = steps + token[None, :] * (2 * COUNT) + f[:, None]
    known = (f < COUNT)[:, None]
    return tl.load(table, mask=known, other=0.0), tl.load(table + COUNT, mask=known, other=0.0)


@triton.jit(do_not_specialize=["query_row", "count", "batch"])
def center_scores_kernel(
    queries,
    rest,
    mean,
    key_rows,
    matrix,
    frequencies,
    steps,
    query_row,
    query_head,
    query_token,
    count,
    batch,
    scaling,
    F: tl.constexpr,
    PAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Added scores of a share of all sequences' pages, for one KV head and block of queries.

    They are written times what the decode kernel multiplies its products with: each page's mean over its first TOKENS
    tokens, as many as are computed at a time, to `mean` fp32 [entries, blocks, H, rows]; what is left to `rest`
    [entries, blocks, H, rows, 128], token = plane * lanes + lane at lane * planes + plane.
    """
    if DEPENDENT:
        # The decode kernel begins with full-precision tokens, and then waits.
        tl.extra.cuda.gdc_launch_dependents()
    COUNT: tl.constexpr = F.key_dim // 2
    R: tl.constexpr = query_rows(F)
    M: tl.constexpr = PAGES * R
    head = tl.program_id(1)
    block = tl.program_id(2)
    last = key_rows + (batch - 1) * KEY_ROW
    total = tl.load(last + 1) + tl.load(last + 3)
    programs = tl.num_programs(0)
    share = (total + programs * PAGES - 1) // (programs * PAGES) * PAGES
    page = tl.program_id(0) * share
    end = tl.minimum(page + share, total)
    if page < end:
        f = tl.arange(0, block_of(COUNT))
        known = f < COUNT
        w = tl.load(frequencies + f, mask=known, other=0.0)
        place = tl.arange(0, TOKENS)
        if TOKENS == PAGE:
            step_cos, step_sin = step_features(steps, place, f, F)
        slot = tl.arange(0, PAGES)
        every = tl.arange(0, M)
        r = every % R
        # The fewest rows of a product, of which the first R are looked at.
        some = tl.arange(0, FEWEST_ROWS) % R
        member = some // F.queries
        asked = block * F.queries + some % F.queries
        here = (head * F.group + member) * query_head + asked * query_token
        real = (member < F.group) & (asked < count)
        number = tl.arange(0, BLOCK_BATCH)
        ends = key_rows + number * KEY_ROW
        there = number < batch
        before_end = tl.load(ends + 1, mask=there, other=0) + tl.load(ends + 3, mask=there, other=0)
        row = tl.sum((there & (before_end <= page)).to(tl.int32), 0)
        while page < end:
            line = key_rows + row * KEY_ROW
            before = tl.load(line + 3)
            entry = tl.load(line) - before
            position = tl.load(line + 2) - before * PAGE
            stop = tl.minimum(end, before + tl.load(line + 1))
            own = (queries + row.to(tl.int64) * query_row + here)[:, None]
            every_channel = tl.arange(0, block_of(F.key_dim))[None, :]
            whole_query = tl.load(own + every_channel, mask=real[:, None] & (every_channel < F.key_dim), other=0.0)
            unit = power_above(tl.max(tl.abs(whole_query.to(tl.float32)), 1))
            first = tl.zeros([FEWEST_ROWS, block_of(COUNT)], tl.float32)
            second = tl.zeros([FEWEST_ROWS, block_of(COUNT)], tl.float32)
            for first_channel in range(0, F.key_dim, CHANNELS):
                channel = first_channel + tl.arange(0, CHANNELS)
                mask = real[:, None] & (channel < F.key_dim)[None, :]
                q = tl.load(own + channel[None, :], mask=mask, other=0.0).to(tl.float32)
                q = q * (1.0 / unit)[:, None]
                part = matrix + (head * F.key_dim + channel[:, None]) * (2 * COUNT) + f[None, :]
                whole = (channel < F.key_dim)[:, None] & known[None, :]
                first = product(q, tl.load(part, mask=whole, other=0.0), first, F)
                second = product(q, tl.load(part + COUNT, mask=whole, other=0.0), second, F)
            turned_unit = power_above(tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1)))
            factor = for_every_page(product_factor(unit * turned_unit, scaling, F)[:, None], M)
            first = for_every_page(first * (1.0 / turned_unit)[:, None], M)
            second = for_every_page(second * (1.0 / turned_unit)[:, None], M)
            for start in range(page, stop, PAGES):
                angle = (position + (start + slot) * PAGE).to(tl.float32)[:, None] * w[None, :]
                cos, sin = cos_and_sin(angle, F)
                cos = for_every_row(cos, PAGES, R)
                sin = for_every_row(sin, PAGES, R)
                turned_first = first * cos + second * sin
                turned_second = second * cos - first * sin
                at = start + every // R
                where = (((entry + at) * tl.num_programs(2) + block) * tl.num_programs(1) + head) * R + r
                for begin in tl.static_range(0, PAGE, TOKENS):
                    if TOKENS < PAGE:
                        step_cos, step_sin = step_features(steps, begin + place, f, F)
                    x = product(turned_first, step_cos, tl.zeros([M, TOKENS], tl.float32), F)
                    x = product(turned_second, step_sin, x, F) * factor
                    if begin == 0:
                        average = tl.sum(x, 1) / TOKENS
                        tl.store(mean + where, average, mask=at < stop)
                    x = (x - average[:, None]).to(rest.dtype.element_ty)
                    target = rest + where[:, None] * PAGE + begin + place[None, :]
                    tl.store(target, x, mask=(at < stop)[:, None])
            page = stop
            row += 1


@triton.jit
def page_center(rest, mean, page, block, blocks, head, heads, F: tl.constexpr):
    """What is added to the scores of one page: fp32 [lanes, rows, planes]."""
    LANES: tl.constexpr = key_lanes(F)
    PLANES: tl.constexpr = PAGE // LANES
    R: tl.constexpr = query_rows(F)
    row = tl.arange(0, R)
    place = ((page * blocks + block) * heads + head).to(tl.int64) * R
    inner = row[None, :, None] * PAGE + tl.arange(0, LANES)[:, None, None] * PLANES
    here = rest + place * PAGE + inner + tl.arange(0, PLANES)[None, None, :]
    return tl.load(here).to(tl.float32) + tl.load(mean + place + row)[None, :, None]


def launch_center_scores(
    queries: torch.Tensor, tables: PageTables, scaling: float, blocks: int, shape: DecodeShape, dependent: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The added scores of all quantized key pages, as `page_center` reads them.

    Args:
        queries: [B, Hq, T, D].
        tables: with a center.
        scaling: factor of the dot products.
        blocks: of queries.
        shape: of the decode kernel.
        dependent: whether that kernel waits on the device, and may be launched while this one is at work.
    """
    center, device, batch = tables.center, queries.device, len(tables.key_rows)
    heads, dtype = center.matrix.shape[0], workspace_dtype(queries.dtype)
    rest = torch.empty(len(tables.keys), blocks, heads, query_rows(shape), PAGE_SIZE, dtype=dtype, device=device)
    mean = torch.empty(rest.shape[:4], dtype=torch.float32, device=device)
    programs = max(1, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // (heads * blocks))
    center_scores_kernel[(programs, heads, blocks)](
        queries,
        rest,
        mean,
        tables.key_rows,
        center.matrix,
        center.frequencies,
        center.steps(PAGE_SIZE, dtype),
        queries.stride(0),
        queries.stride(1),
        queries.stride(2),
        queries.shape[2],
        batch,
        scaling,
        F=shape,
        **center_constants(shape, capability(device)[0]),
        BLOCK_BATCH=triton.next_power_of_2(batch),
        DEPENDENT=dependent,
        num_warps=center_warps(shape),
        num_stages=STAGES,
    )
    return rest, mean


def workspace_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of added scores less their means, for queries of a dtype."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def center_constants(shape: DecodeShape, major: int) -> dict[str, int]:
    """Compile-time arguments: pages whose query rows are those of one product, and tokens, as registers allow them.

    Args:
        shape: of the decode kernel.
        major: the GPU's compute capability; from 9 on operands stay in shared memory.
    """
    rows, wide = query_rows(shape), shape.key_dim > 128
    if shape.split_query:
        return {"PAGES": 16 // rows, "TOKENS": 32}
    return {"PAGES": (64 if major >= 9 else 32) // rows, "TOKENS": PAGE_SIZE // 2 if wide else PAGE_SIZE}


def center_warps(shape: DecodeShape) -> int:
    """Warps of `center_scores_kernel`."""
    return 8 if shape.key_dim > 128 else 4
