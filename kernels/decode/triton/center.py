"""What the constant part of keys adds to the scores of a step, for all quantized key pages, before they are read.

With q M = [a, b] for the F frequencies w, and t the position of a page's first token, token j of the page gets

    q . c(t + j) = (a cos(t w) + b sin(t w)) . cos(j w) + (b cos(t w) - a sin(t w)) . sin(j w)

(`kernels/pages/center.py`): the queries are turned back once per page, and multiplied with a table that all pages
share. The decode kernel has one warp per program and no room for the table; so a kernel of its own, whose programs
hold it, takes several pages for the rows of one product, and leaves the results in a workspace, in the order in which
the decode kernel has its scores. Tiles of as many pages are divided evenly among a fixed number of programs, which find
on the device how many there are.

From Hopper on this kernel, the decode kernel and the merge are each launched while the one before is at work, and a
captured graph has the same edges. That is safe for three reasons.

- Each of them waits in every program, so that it is complete only when all before it are. What is launched as usual
  (the next layer's append, a flush that writes pages, the tables of the next step) therefore begins when nobody reads
  scores, pages or tokens of this step any more.
- This kernel writes scores, and lets the decode kernel begin, only after it has waited: then the append is complete,
  whose tokens and queries the decode kernel reads before it waits itself, and so is whoever used the workspace before.
- Before it waits, it reads what no kernel directly before it writes: `key_rows`, after which a group's other tables
  are written, and the center, whose first use computes its steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvconvert.kernels.decode.plan import PageTables
from kvconvert.kernels.decode.triton import DecodeShape, block_of, key_lanes, power_above, query_rows
from kvconvert.kernels.decode.triton.softmax import product_factor
from kvconvert.kernels.decode.triton.tiles import PAGE
from kvconvert.kernels.device import capability, multiprocessors
from kvconvert.kernels.launches.triton import kernel
from kvconvert.kernels.page_formats import PAGE_SIZE
from kvconvert.kernels.pages.triton.center import cos_and_sin

# Columns of `PageTables.key_rows`.
KEY_ROW = tl.constexpr(3)
FEWEST_ROWS = tl.constexpr(16)
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
def step_features(steps, place, f, F: tl.constexpr):
    """cos(j w) and sin(j w), [F, N], of the tokens j at `place` [N] of a row of `rest`."""
    COUNT: tl.constexpr = F.keys.head_dim // 2
    PLANES: tl.constexpr = PAGE // key_lanes(F)
    token = place % PLANES * key_lanes(F) + place // PLANES
    table = steps + token[None, :] * (2 * COUNT) + f[:, None]
    known = (f < COUNT)[:, None]
    return tl.load(table, mask=known, other=0.0), tl.load(table + COUNT, mask=known, other=0.0)


@triton.jit
def center_part(matrix, head, begin, f, CHANNELS: tl.constexpr, F: tl.constexpr):
    """Both halves of some channels' rows of a head's matrix: [CHANNELS, F] each."""
    COUNT: tl.constexpr = F.keys.head_dim // 2
    channel = begin + tl.arange(0, CHANNELS)
    here = matrix + (head * F.keys.head_dim + channel[:, None]) * (2 * COUNT) + f[None, :]
    known = (channel < F.keys.head_dim)[:, None] & (f < COUNT)[None, :]
    return tl.load(here, mask=known, other=0.0), tl.load(here + COUNT, mask=known, other=0.0)


@kernel(do_not_specialize=["query_row", "count", "batch"])
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
    CHANNELS: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Added scores of a share of all sequences' pages, for one KV head and block of queries.

    They are written times what the decode kernel multiplies its products with: each page's mean over its first TOKENS
    tokens, as many as are computed at a time, to `mean` fp32 [entries, blocks, H, rows]; what is left to `rest`
    [entries, blocks, H, rows, 128], token = plane * lanes + lane at lane * planes + plane.
    """
    COUNT: tl.constexpr = F.keys.head_dim // 2
    R: tl.constexpr = query_rows(F)
    M: tl.constexpr = PAGES * R
    head = tl.program_id(1)
    block = tl.program_id(2)
    number = tl.arange(0, BLOCK_BATCH)
    tiles = tl.load(key_rows + number * KEY_ROW + 1, mask=number < batch, other=0)
    tiles = (tiles.to(tl.int32) + PAGES - 1) // PAGES
    total = tl.sum(tiles, 0)
    before_end = tl.cumsum(tiles, 0)
    share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
    tile = tl.program_id(0) * share
    end = tl.minimum(tile + share, total)
    f = tl.arange(0, block_of(COUNT))
    w = tl.load(frequencies + f, mask=f < COUNT, other=0.0)
    if F.keys.head_dim <= CHANNELS:
        of_cos, of_sin = center_part(matrix, head, 0, f, CHANNELS, F)
    place = tl.arange(0, TOKENS)
    every = tl.arange(0, M)
    r = every % R
    # The fewest rows of a product, of which the first R are looked at.
    some = tl.arange(0, FEWEST_ROWS) % R
    member = some // F.queries
    asked = block * F.queries + some % F.queries
    here = (head * F.group + member) * query_head + asked * query_token
    real = (member < F.group) & (asked < count)
    row = tl.sum((before_end <= tile).to(tl.int32), 0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the decode kernel begins with full-precision tokens, which the append has just stored.
        tl.extra.cuda.gdc_launch_dependents()
    while tile < end:
        before = tl.sum(tl.where(number < row, tiles, 0), 0)
        line = key_rows + row * KEY_ROW
        entry = tl.load(line)
        pages = tl.load(line + 1).to(tl.int32)
        position = tl.load(line + 2)
        stop = tl.minimum(end - before, (pages + PAGES - 1) // PAGES)
        own = (queries + row.to(tl.int64) * query_row + here)[:, None]
        every_channel = tl.arange(0, block_of(F.keys.head_dim))[None, :]
        query = tl.load(own + every_channel, mask=real[:, None] & (every_channel < F.keys.head_dim), other=0.0)
        if TOKENS == PAGE:
            step_cos, step_sin = step_features(steps, place, f, F)
        query = query.to(tl.float32)
        unit = power_above(tl.max(tl.abs(query), 1))
        if F.keys.head_dim <= CHANNELS:
            query = query * (1.0 / unit)[:, None]
            none = tl.zeros([FEWEST_ROWS, block_of(COUNT)], tl.float32)
            first = product(query, of_cos, none, F)
            second = product(query, of_sin, none, F)
        else:
            first = tl.zeros([FEWEST_ROWS, block_of(COUNT)], tl.float32)
            second = tl.zeros([FEWEST_ROWS, block_of(COUNT)], tl.float32)
            for first_channel in range(0, F.keys.head_dim, CHANNELS):
                channel = first_channel + tl.arange(0, CHANNELS)
                mask = real[:, None] & (channel < F.keys.head_dim)[None, :]
                q = tl.load(own + channel[None, :], mask=mask, other=0.0).to(tl.float32) * (1.0 / unit)[:, None]
                part_cos, part_sin = center_part(matrix, head, first_channel, f, CHANNELS, F)
                first = product(q, part_cos, first, F)
                second = product(q, part_sin, second, F)
        turned_unit = power_above(tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1)))
        factor = for_every_page(product_factor(unit * turned_unit, scaling, F)[:, None], M)
        first = for_every_page(first * (1.0 / turned_unit)[:, None], M)
        second = for_every_page(second * (1.0 / turned_unit)[:, None], M)
        for number_of_tile in range(tile - before, stop):
            page = number_of_tile * PAGES + tl.arange(0, PAGES)
            angle = (position + page * PAGE).to(tl.float32)[:, None] * w[None, :]
            cos, sin = cos_and_sin(angle, F.inline_asm and not F.split_query)
            cos = for_every_row(cos, PAGES, R)
            sin = for_every_row(sin, PAGES, R)
            turned_first = first * cos + second * sin
            turned_second = second * cos - first * sin
            at = number_of_tile * PAGES + every // R
            where = (((entry + at) * tl.num_programs(2) + block) * tl.num_programs(1) + head) * R + r
            for begin in tl.static_range(0, PAGE, TOKENS):
                if TOKENS < PAGE:
                    step_cos, step_sin = step_features(steps, begin + place, f, F)
                x = product(turned_first, step_cos, tl.zeros([M, TOKENS], tl.float32), F)
                x = product(turned_second, step_sin, x, F) * factor
                if begin == 0:
                    average = tl.sum(x, 1) / TOKENS
                    tl.store(mean + where, average, mask=at < pages, eviction_policy="evict_last")
                x = (x - average[:, None]).to(rest.dtype.element_ty)
                target = rest + where[:, None] * PAGE + begin + place[None, :]
                tl.store(target, x, mask=(at < pages)[:, None], eviction_policy="evict_last")
        tile = before + stop
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
        blocks: how many blocks of queries there are.
        shape: the shape of the decode kernel.
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
        **({"launch_pdl": True} if dependent else {}),
    )
    return rest, mean


def workspace_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of added scores less their means, for queries of a dtype."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def center_constants(shape: DecodeShape, major: int) -> dict[str, int]:
    """Compile-time arguments: pages whose query rows are those of one product, tokens and channels that are multiplied
    at a time, as registers and shared memory allow them.

    Args:
        shape: the shape of the decode kernel.
        major: the GPU's compute capability; from 9 on operands stay in shared memory.
    """
    rows, tokens, channels = 64 if major >= 9 else 32, PAGE_SIZE, min(64, block_of(shape.keys.head_dim))
    if shape.split_query:
        rows, tokens = 16, 32
    elif shape.keys.head_dim > 128:
        tokens = 64
    elif major == 9:
        # The whole matrix, in shared memory; elsewhere it would take more registers than there are.
        channels = block_of(shape.keys.head_dim)
    return {"PAGES": rows // query_rows(shape), "TOKENS": tokens, "CHANNELS": channels}


def center_warps(shape: DecodeShape) -> int:
    """Warps of `center_scores_kernel`."""
    return 8 if shape.keys.head_dim > 128 else 4
