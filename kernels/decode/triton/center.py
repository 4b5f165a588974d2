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
from kvconvert.kernels.device import multiprocessors
from kvconvert.kernels.pages.formats import PAGE_SIZE

# Columns of `PageTables.key_rows`.
KEY_ROW = tl.constexpr(4)
PROGRAMS_PER_MULTIPROCESSOR = 2
WARPS = 4


@triton.jit
def product(left, right, total, F: tl.constexpr):
    """`total` plus a product of fp16 numbers; of fp32 ones, exactly, where queries are of that dtype."""
    if F.split_query:
        return tl.dot(left, right.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(left.to(tl.float16), right.to(tl.float16), total)


@triton.jit
def every_page(x, PAGES: tl.constexpr, ROWS: tl.constexpr):
    """[PAGES, K] to [PAGES * ROWS, K], each row as often as a page has query rows."""
    wide = tl.broadcast_to(x[:, None, :], [PAGES, ROWS, x.shape[1]])
    return tl.reshape(wide, [PAGES * ROWS, x.shape[1]])


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
    BLOCK_BATCH: tl.constexpr,
):
    """Added scores of a share of all sequences' pages, for one KV head and block of queries.

    They are written times what the decode kernel multiplies its products with: each page's mean over its tokens to
    `mean` fp32 [entries, blocks, H, rows], and what is left to `rest` [entries, blocks, H, rows, 128], token = plane *
    lanes + lane at lane * planes + plane.
    """
    COUNT: tl.constexpr = F.key_dim // 2
    R: tl.constexpr = query_rows(F)
    M: tl.constexpr = PAGES * R
    PLANES: tl.constexpr = PAGE // key_lanes(F)
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
        place = tl.arange(0, PAGE)
        token = place % PLANES * key_lanes(F) + place // PLANES
        table = steps + token[None, :] * (2 * COUNT) + f[:, None]
        step_cos = tl.load(table, mask=known[:, None], other=0.0)
        step_sin = tl.load(table + COUNT, mask=known[:, None], other=0.0)
        channel = tl.arange(0, block_of(F.key_dim))
        part = matrix + (head * F.key_dim + channel[:, None]) * (2 * COUNT) + f[None, :]
        whole = (channel < F.key_dim)[:, None] & known[None, :]
        of_cos = tl.load(part, mask=whole, other=0.0)
        of_sin = tl.load(part + COUNT, mask=whole, other=0.0)
        slot = tl.arange(0, PAGES)
        every = tl.arange(0, M)
        r = every % R
        member = r // F.queries
        asked = block * F.queries + r % F.queries
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
            own = queries + row.to(tl.int64) * query_row + here[:, None] + channel[None, :]
            q = tl.load(own, mask=real[:, None] & (channel < F.key_dim)[None, :], other=0.0).to(tl.float32)
            unit = power_above(tl.max(tl.abs(q), 1))
            q = q / unit[:, None]
            none = tl.zeros([M, block_of(COUNT)], tl.float32)
            first = product(q, of_cos, none, F)
            second = product(q, of_sin, none, F)
            turned_unit = power_above(tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1)))
            first = first / turned_unit[:, None]
            second = second / turned_unit[:, None]
            factor = product_factor(unit * turned_unit, scaling, F)
            for start in range(page, stop, PAGES):
                angle = (position + (start + slot) * PAGE).to(tl.float32)[:, None] * w[None, :]
                cos = every_page(tl.cos(angle), PAGES, R)
                sin = every_page(tl.sin(angle), PAGES, R)
                x = product(first * cos + second * sin, step_cos, tl.zeros([M, PAGE], tl.float32), F)
                x = product(second * cos - first * sin, step_sin, x, F) * factor[:, None]
                average = tl.sum(x, 1) / PAGE
                at = start + every // R
                where = (((entry + at) * tl.num_programs(2) + block) * tl.num_programs(1) + head) * R + r
                tl.store(mean + where, average, mask=at < stop)
                x = (x - average[:, None]).to(rest.dtype.element_ty)
                tl.store(rest + where[:, None] * PAGE + place[None, :], x, mask=(at < stop)[:, None])
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
    queries: torch.Tensor, tables: PageTables, scaling: float, blocks: int, shape: DecodeShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """The added scores of all quantized key pages, as `page_center` reads them.

    Args:
        queries: [B, Hq, T, D].
        tables: with a center.
        scaling: factor of the dot products.
        blocks: of queries.
        shape: of the decode kernel.
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
        PAGES=pages_at_once(shape),
        BLOCK_BATCH=triton.next_power_of_2(batch),
        num_warps=WARPS,
    )
    return rest, mean


def workspace_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of added scores less their means, for queries of a dtype."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def pages_at_once(shape: DecodeShape) -> int:
    """Pages whose query rows are those of one product, at least 16: as many as registers hold."""
    most = 16 if shape.split_query else 32 if shape.key_dim > 128 else 64
    return max(1, most // query_rows(shape))
