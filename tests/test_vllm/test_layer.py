"""A layer over blocks, pass by pass, against pages and float64 attention computed from all that was ever stored."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from kvconvert.cache import layer_format
from kvconvert.cache.plan_tensors import with_plan
from kvconvert.kernels.attention import Scoring, attention_reference
from kvconvert.kernels.device import interpreted
from kvconvert.kernels.launches import record_specializations
from kvconvert.kernels.pages import dequantize_pages, page_centers, quantize_pages
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.methods import KVScheme
from kvconvert.vllm.attention import LayerStep, quantize_pending, rehearse
from kvconvert.vllm.blocks import BlockLayout, LayerBatch, LayerBlocks, alike, block_layouts
from kvconvert.vllm.prompts import Flash, PackedPrompts, Packing, Workspace, divide_prompts
from kvconvert.vllm.step import DecodeTables, StepPlan, plan_step

pytestmark = pytest.mark.usefixtures("quick_interpreter")
HEADS, GROUP, DIM, REQUESTS, LONGEST = 2, 2, 32, 3, 700
# What calibration would leave of a layer.
PLAN = {
    "key_mean": torch.linspace(-1, 1, HEADS * DIM).view(HEADS, DIM),
    "rope_frequencies": 10000.0 ** -torch.linspace(0, 1, DIM // 2),
    "rope_pairs": torch.arange(DIM).view(2, DIM // 2).T.contiguous(),
    "key_feedback": torch.eye(DIM) + 0.02 * torch.ones(HEADS, DIM, DIM).triu(1),
    "boosted_channels": torch.tensor([[1, 5, 8, 30], [0, 2, 3, 31]], dtype=torch.int32),
    **{f"static_{side}_scale": torch.full((HEADS, DIM), 0.04) for side in ("key", "value")},
    **{f"static_{side}_zero_point": torch.full((HEADS, DIM), -5.0) for side in ("key", "value")},
}
# Reads of what was never written give NaN.
POISON = 0x7FFF


PLAIN = Scoring(DIM**-0.5)


class Layer:
    """One layer's blocks, as vLLM would hand them out, beside everything that its requests have stored."""

    def __init__(
        self,
        scheme: KVScheme,
        kernels: bool,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        flash: Flash | None = None,
        drafts: int = 0,
        scoring: Scoring = PLAIN,
        beside: Layer | None = None,
        layout: BlockLayout | None = None,
        memory: torch.Tensor | None = None,
        shares: bool = False,
        value_dim: int = DIM,
        tensors: dict[str, torch.Tensor] = PLAN,
    ):
        cache = layer_format(scheme, heads=HEADS, key_dim=DIM, value_dim=value_dim)
        self.device, self.dtype, self.value_dim = torch.device(device), dtype, value_dim
        self.format = with_plan(cache, scheme, tensors, torch.device("cpu"))
        self.layout, self.scoring, self.beside = layout or BlockLayout.of(cache, dtype, drafts), scoring, beside
        self.rotations, self.kernels = cache.rotations, kernels
        each = self.layout.blocks_for(LONGEST)
        shape = (1 + each * REQUESTS, 1, 1, self.layout.block_bytes // 2)
        if memory is None:
            memory = torch.full(shape, POISON, dtype=torch.int16, device=self.device)
        format = with_plan(cache, scheme, tensors, self.device)
        self.blocks = LayerBlocks(format, self.layout, dtype, memory)
        # Scattered, and never block 0, which vLLM leaves to no request.
        self.table = torch.zeros(REQUESTS, each + 3, dtype=torch.int32)
        self.table[:, :each] = (torch.randperm(each * REQUESTS) + 1).view(REQUESTS, each)
        self.table = self.table.to(self.device)
        self.marks = torch.zeros(shape[0], dtype=torch.uint8, device=self.device) if shares else None
        self.tables = DecodeTables([self.blocks], REQUESTS + 2, 6 * REQUESTS) if kernels else None
        memory = Workspace(self.blocks.words.new_empty(1 << 19))
        self.packing = Packing(self.blocks, flash, memory) if kernels else None
        if beside is not None:
            self.table, self.tables, self.packing = beside.table, beside.tables, beside.packing
        if beside is not None and kernels:
            self.tables.include([self.blocks])
        self.keys, self.values = ([torch.zeros(HEADS, 0, dim) for _ in range(REQUESTS)] for dim in (DIM, value_dim))
        self.pages: dict[tuple[str, int, int], torch.Tensor] = {}

    def run(self, lengths: list[int], accepted: list[int] | None = None, answers: bool = False) -> float:
        """One pass with so many new tokens of each request; the largest difference from the reference.

        Where it is said how many are accepted, they are drafts of which others are taken back; what each attends to is
        what it would attend to if it came alone. Other tokens are of prompts, or of answers.
        """
        starts = [sum(lengths[:row]) for row in range(REQUESTS + 1)]
        queries = torch.randn(starts[-1], HEADS * GROUP, DIM).to(self.dtype)
        keys, values = (torch.randn(starts[-1], HEADS, dim).to(self.dtype) for dim in (DIM, self.value_dim))
        totals = [stored.shape[1] + new for stored, new in zip(self.keys, lengths, strict=True)]
        if self.beside is None:
            of_prompts = [accepted is None and not answers] * REQUESTS
            self.plan = plan_step(self.layout, starts, totals, self.table, self.marks, of_prompts)
            self.plan.pending  # noqa: B018
            self.plan.note_quantized()
            self.prompts = divide_prompts(self.plan, self.packing)
        else:
            self.plan, self.prompts = self.beside.plan, self.beside.prompts
        plan = self.plan
        with interpreted() if self.kernels and self.device.type == "cpu" else nullcontext():
            if self.packing is not None and self.beside is None:
                self.packing.workspace.finish()
            quantize_pending([LayerBatch([self.blocks])], plan)
            if self.tables is not None and self.beside is None:
                decodes = plan.decodes
                about = ([getattr(r, name) for r in decodes] for name in ("row", "tokens", "recent"))
                self.tables.write(self.table, *about)
            output = self.attend(plan, queries, keys, values).cpu().float()
        # What is stored is what the passes themselves have rotated, in their dtype.
        if self.rotations.keys:
            queries, keys = hadamard_transform(queries), hadamard_transform(keys)
        if self.rotations.values:
            values, output = hadamard_transform(values), hadamard_transform(output)
        worst = 0.0
        for row in range(REQUESTS):
            new = slice(starts[row], starts[row + 1])
            if lengths[row]:
                own = [x[new].transpose(0, 1).float() for x in (queries, keys, values)]
                if accepted is None:
                    expected = self._attention(row, *own, recent=self.marks is None or answers)
                else:
                    parts = zip(*(x.split(1, 1) for x in own), strict=True)
                    expected = torch.cat([self._attention(row, *part) for part in parts], 1)
                    self._take_back(row, lengths[row] - accepted[row])
                difference = (output[new].transpose(0, 1) - expected).abs().max().item()
                worst = max(worst, difference) if difference == difference else float("inf")
        return worst

    def _take_back(self, row: int, count: int) -> None:
        kept = self.keys[row].shape[1] - count
        self.keys[row], self.values[row] = self.keys[row][:, :kept], self.values[row][:, :kept]
        pages = dict(zip(("keys", "values"), self.layout.quantized(kept), strict=True))
        self.pages = {key: page for key, page in self.pages.items() if key[1] != row or key[2] < pages[key[0]]}

    def attend(self, plan: StepPlan, *tokens: torch.Tensor) -> torch.Tensor:
        """The attention of queries, keys [n, heads, D] and values [n, heads, E] in one pass."""
        queries, keys, values = (x.to(self.device) for x in tokens)
        output = queries.new_full((*queries.shape[:2], self.value_dim), float("nan"))
        step = LayerStep(self.blocks, plan, self.scoring, self.prompts, self.tables)
        step.run(queries, keys, values, output)
        return output

    def _attention(
        self, row: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, recent: bool = True
    ) -> torch.Tensor:
        """Attention of a chunk over what the request has stored as it is stored, and over itself."""
        stored = self.keys[row].shape[1]
        pages = self.layout.quantized(stored, recent)
        history = self.keys[row].clone(), self.values[row].clone()
        for number in range(max(pages)):
            part = slice(128 * number, 128 * number + 128)
            if number < pages[0]:
                history[0][:, part] = self._page("keys", row, number)
            if number < pages[1]:
                history[1][:, part] = self._page("values", row, number)
        for side, whole in zip(history, (self.keys[row], self.values[row]), strict=True):
            side[:, : self.layout.sink_tokens] = whole[:, : self.layout.sink_tokens]
        self.keys[row] = torch.cat([self.keys[row], keys], 1)
        self.values[row] = torch.cat([self.values[row], values], 1)
        every = [torch.cat(side, 1) for side in zip(history, (keys, values), strict=True)]
        length = queries.shape[1]
        visible = torch.arange(stored + length) <= torch.arange(stored, stored + length).unsqueeze(1)
        return attention_reference(queries, *every, visible, *self.scoring[:3]).output.float()

    def _page(self, side: str, row: int, number: int) -> torch.Tensor:
        """A complete page of a request's keys or values [HEADS, 128, channels] as it is stored, computed once."""
        if (side, row, number) not in self.pages:
            part, hidden = slice(128 * number, 128 * number + 128), 0 if number else self.layout.sink_tokens
            f = self.format
            if side == "keys":
                center = 0.0
                if f.key_tensors.center is not None:
                    center = page_centers(torch.tensor([128 * number]), 128, f.key_tensors.center)
                whole = self.keys[row][None, :, part] - center
                page = quantize_pages(whole, *f.side(True), hidden)
                stored = dequantize_pages(page, f.key_tensors) + center
            else:
                page = quantize_pages(self.values[row][None, :, part], *f.side(False), hidden)
                stored = dequantize_pages(page, f.value_tensors)
            self.pages[side, row, number] = stored[0]
        return self.pages[side, row, number]


SCHEMES = {
    "kivi": KVScheme.preset("kivi"),
    "without sinks": replace(KVScheme.preset("kivi"), sink_tokens=0),
    "value window": replace(KVScheme.preset("kivi"), value_recent_tokens=128),
    "key window": replace(KVScheme.preset("kivi"), key_recent_tokens=130),
    "oscar": KVScheme.preset("oscar-g128").with_online_rotation(),
    "kitty": KVScheme.preset("kitty"),
    "calibrated": KVScheme(
        sink_tokens=4,
        key_center="calibrated",
        key_rounding="error_feedback",
        boost_fraction=0.125,
        boost_select="calibrated",
        rotate_keys="hadamard",
    ),
    "static": KVScheme(key_bits=8, value_bits=8, static_scales="calibrated", sink_tokens=4),
    "16-bit values": KVScheme(key_bits=3, value_bits=16, sink_tokens=4),
    "scales of 8 bits": KVScheme(
        value_bits=1, key_scale_bits=8, value_scale_bits=8, boost_fraction=0.25, sink_tokens=4
    ),
}
# Prompts whole and in chunks beside decoding requests; pages that a prompt, a chunk or a decoded token completes.
PASSES = [[127, 0, 0], [1, 40, 0], [1, 100, 1], [200, 128, 1], [1, 1, 1], [0, 1, 130], [1, 1, 1], [100, 1, 0]]
# Decoding over the end of a page in every request, and of what a window of 130 or sink tokens keep beside pages.
STEPS = [[60, 90, 100], *[[1, 1, 1]] * 30]


def test_tables_hold_the_pages_of_all_rows_one_after_another_and_nothing_of_lengths_that_no_cache_holds():
    blocks = Layer(SCHEMES["kivi"], kernels=False).blocks
    tables = DecodeTables([blocks], 4, 9)
    table = torch.arange(1, 91, dtype=torch.int32).view(3, 30)
    first = blocks.layout.first_page
    pages = torch.stack([*table[0, first : first + 3], table[2, first]])
    with interpreted():
        tables.write(table, [0, 1, 2], [385, 0, 140])
        found = tables.page_tables(blocks, 8, 3)
        assert found.keys[:4].tolist() == (pages * blocks.block_units).tolist()
        assert (found.values - found.keys)[:4].tolist() == [blocks.geometry.key_units] * 4
        assert [pages for pages in found.plan.items[:, 1:3].tolist() if pages[1]] == [[0, 2], [2, 3], [3, 4]]
        assert tables.targets(blocks, 4)[1].tolist() == [0, -1, 0, -1]
        tables.write(table, [0, 1, 2], [1024, 1024, 1024])
    assert set(tables.targets(blocks, 4)[1].tolist()) == {-1}
    assert not found.plan.items[:, 1:3].any()


def test_prompts_are_packed_as_far_as_the_workspace_has_room_and_others_go_alone():
    layer = Layer(SCHEMES["kivi"], kernels=False)
    # A decoding request, prompts that fit together, one that fits alone, one that does not fit, and a last one.
    lengths = [1, 90, 100, 250, 650, 30]
    starts = [sum(lengths[:row]) for row in range(7)]
    table = layer.table[:1].repeat(6, 1)
    plan = plan_step(layer.layout, starts, [200, 90, 100, 250, 650, 30], table)
    memory = Workspace(torch.empty(300 * layer.layout.token_bytes, dtype=torch.uint8))
    parts = divide_prompts(plan, Packing(layer.blocks, None, memory))
    assert [(part.start, part.stop) for part, _ in parts] == [(1, 191), (191, 441), (441, 1091), (1091, 1121)]
    assert [isinstance(prompts, PackedPrompts) for _, prompts in parts] == [True, True, False, True]
    assert parts[2][1] is plan.requests[4]
    alone = divide_prompts(plan, None)
    assert [request for _, request in alone] == list(plan.requests[1:])


@pytest.mark.parametrize("name", ["calibrated", "static", "kitty"])
def test_layers_in_one_allocation_are_quantized_together_as_each_alone(name):
    torch.manual_seed(0)
    together, alone = ([Layer(SCHEMES[name], kernels=False) for _ in range(3)] for _ in range(2))
    shape = together[0].blocks.words.shape
    memory = torch.full((3, *shape), POISON, dtype=torch.int16)
    for number, layer in enumerate(together):
        own = layer.blocks
        layer.blocks = LayerBlocks(own.format, own.layout, own.dtype, memory[number])
    groups = alike([layer.blocks for layer in together])
    assert sum(len(group.layers) for group in groups) == 3
    assert len(groups) == (1 if name == "kitty" else 3)
    tokens = torch.randn(3, 3, 256, 2, HEADS, DIM)
    table = alone[0].table
    for layer, other, own in zip(together, alone, tokens, strict=True):
        for blocks in (layer.blocks, other.blocks):
            plan = plan_step(layer.layout, [0, 256, 512, 768], [256] * 3, table)
            for request, part in zip(plan.requests, own, strict=True):
                blocks.write(*plan.places(layer.layout, request, 0, 256), *part.unbind(1))
    plan = plan_step(together[0].layout, [0, 1, 2, 3], [257] * 3, table)
    assert plan.pending
    quantize_pending(groups, plan)
    for layer, other in zip(together, alone, strict=True):
        quantize_pending([LayerBatch([other.blocks])], plan)
        torch.testing.assert_close(layer.blocks.words, other.blocks.words, rtol=0, atol=0)


@pytest.mark.quick("True-False")
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_layers_with_blocks_of_different_sizes_follow_one_plan(kernels, side_by_side):
    """A pass is computed layer after layer, so that none may write where another's tokens are still to be read."""
    torch.manual_seed(0)
    windows = {"sink_tokens": 4, "value_recent_tokens": 128}
    schemes = [KVScheme(key_bits=bits, value_bits=bits, **windows) for bits in (2, 8, 16)]
    caches = [layer_format(scheme, heads=HEADS, key_dim=DIM) for scheme in schemes]
    layouts = block_layouts(caches, torch.float32, side_by_side=side_by_side)
    assert len({layout.block_bytes for layout in layouts}) == 3
    assert len({layout.tokens_per_block for layout in layouts}) == (1 if side_by_side else 3)
    memory: list[torch.Tensor | None] = [None] * 3
    if side_by_side:
        sizes = [layout.block_bytes // 2 for layout in layouts]
        count = 1 + layouts[0].blocks_for(LONGEST) * REQUESTS
        memory = list(torch.full((count, sum(sizes)), POISON, dtype=torch.int16).split(sizes, 1))
    layers: list[Layer] = []
    for scheme, layout, own in zip(schemes, layouts, memory, strict=True):
        beside = layers[0] if layers else None
        layers.append(Layer(scheme, kernels=kernels, layout=layout, memory=own, beside=beside))
    for lengths in PASSES[:5] if kernels else PASSES + STEPS:
        for layer in layers:
            assert layer.run(lengths) < (1e-3 if kernels else 2e-6), lengths


@pytest.mark.full
def test_layers_that_are_alike_store_what_prompts_leave_together_as_far_as_the_workspace_has_room(monkeypatch):
    torch.manual_seed(0)
    scheme, count = KVScheme(sink_tokens=4, key_center="calibrated", key_rounding="error_feedback"), 3
    layers = [Layer(scheme, kernels=True)]
    first = layers[0].blocks
    room = Workspace(first.words.new_empty(7 * 128 * first.layout.token_bytes // 2))
    layers[0].packing = Packing(first, None, room)
    for factor in range(2, count + 1):
        own = {name: PLAN[name] * factor for name in ("key_mean", "key_feedback")}
        layers.append(Layer(scheme, kernels=True, beside=layers[0], tensors=PLAN | own))
    stored, store = [], PackedPrompts._store
    monkeypatch.setattr(PackedPrompts, "_store", lambda *args: stored.append(len(args[1])) or store(*args))
    # Two pages of the workspace, three, and five in each layer.
    for lengths in [[127, 40, 0], [0, 100, 200], [1, 20, 130], [1, 1, 1]]:
        for layer in layers:
            assert layer.run(lengths) < 1e-3, lengths
    assert stored == [3, 2, 1, 1, 1, 1]


@pytest.mark.quick("value window", "kitty", "calibrated", "scales of 8 bits")
@pytest.mark.parametrize("name", SCHEMES)
def test_a_pass_attends_to_what_is_stored_as_it_is_stored(name):
    torch.manual_seed(0)
    layer = Layer(SCHEMES[name], kernels=False)
    for lengths in PASSES + STEPS:
        assert layer.run(lengths) < 2e-6, lengths


FULL = pytest.mark.full


@pytest.mark.quick("oscar", "value window")
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize("name", ["kivi", "oscar", "value window"])
def test_values_may_have_fewer_channels_than_keys(name, kernels):
    torch.manual_seed(0)
    layer = Layer(SCHEMES[name], kernels=kernels, value_dim=16)
    for lengths in [[127, 0, 0], [1, 40, 0], [130, 3, 129], [1, 1, 1]] if kernels else PASSES + STEPS:
        assert layer.run(lengths) < (1e-3 if kernels else 2e-6), lengths


@pytest.mark.quick("value window")
@pytest.mark.parametrize(
    ("name", "kernels"),
    [("kivi", False), ("value window", False), ("key window", False), pytest.param("key window", True, marks=FULL)],
)
def test_a_prompt_goes_on_from_the_pages_of_another_and_its_answer_has_its_newest_tokens(name, kernels):
    torch.manual_seed(0)
    layer, most = Layer(SCHEMES[name], kernels=kernels, shares=True), 1e-3 if kernels else 2e-6
    for lengths in [[200, 0, 0], [57, 0, 0]]:
        assert layer.run(lengths) < most
    assert layer.run([1, 0, 0], answers=True) < most
    # Of two pages, of which the second is recent in the answer of the first request.
    sinks, first = layer.layout.sink_blocks, layer.layout.first_page
    for shared in (slice(sinks), slice(first, first + 2)):
        layer.table[2, shared] = layer.table[0, shared]
    layer.keys[2], layer.values[2] = layer.keys[0][:, :256], layer.values[0][:, :256]
    for lengths in [[0, 0, 60], [0, 30, 1], [0, 0, 80]]:
        assert layer.run(lengths) < most, lengths
    for _ in range(120):
        assert layer.run([1, 0, 1], answers=True) < most
        if kernels:
            break


# New tokens of each request and how many of them are accepted: drafts that end before a page, at its end and behind it,
# taken back to before it, to its end and not at all; pages that come to their end a second time.
DRAFTED = [
    ([125, 250, 100], None), ([4, 4, 4], [1, 4, 4]), ([1, 4, 4], [1, 2, 4]), ([4, 4, 1], [1, 1, 1]),
    ([4, 4, 4], [1, 1, 1]), ([4, 1, 4], [3, 1, 2]), ([4, 4, 4], [4, 4, 4]), ([2, 3, 4], [2, 2, 1]),
    *[([4, 4, 4], [4, 3, 1])] * 40,
]  # fmt: skip


@pytest.mark.quick("value window")
@pytest.mark.parametrize("name", ["kivi", "calibrated", "value window", "key window", "16-bit values"])
def test_drafts_attend_to_what_they_would_without_and_are_taken_back(name):
    torch.manual_seed(0)
    layer = Layer(SCHEMES[name], kernels=False, drafts=3)
    for lengths, accepted in DRAFTED:
        assert layer.run(lengths, accepted) < 2e-6, (lengths, accepted)
    # Pages that requests share are known by what was accepted.
    assert max(keys.shape[1] for keys in layer.keys) > 3 * 128


def test_drafts_are_divided_where_they_complete_a_page():
    layout = Layer(SCHEMES["value window"], kernels=False, drafts=3).layout
    table = torch.zeros(3, 40, dtype=torch.int32)
    plan = plan_step(layout, [0, 4, 8, 12], [258, 130, 130], table, prompts=[False, True, False])
    found = [(r.row, r.first, r.stored, r.length, r.drafted, r.continues) for r in plan.requests]
    assert found == [
        (0, 0, 254, 2, True, True), (0, 2, 256, 2, True, False), (1, 4, 126, 4, False, False),
        (2, 8, 126, 2, True, True), (2, 10, 128, 2, True, False),
    ]  # fmt: skip
    assert not plan.decodes


@pytest.mark.parametrize("drafts", [0, 3])
def test_rows_that_a_recorded_pass_is_padded_with_take_no_part(drafts):
    layout = Layer(SCHEMES["kivi"], kernels=False, drafts=drafts).layout
    table = torch.zeros(4, 40, dtype=torch.int32)
    plan = plan_step(layout, [0, 1, 2, 2, 2], [5, 300, 0, 0], table, prompts=[False, False])
    assert [(r.row, r.first, r.stored, r.length) for r in plan.decodes] == [(0, 0, 4, 1), (1, 1, 299, 1)]
    assert not plan.prompts


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize("more", [{"softcap": 2.0}, {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])}], ids=list)
def test_logits_are_capped_and_joined_by_those_of_sinks(more, kernels):
    torch.manual_seed(0)
    scoring = Scoring(DIM**-0.5, **more)
    layer = Layer(SCHEMES["calibrated"], kernels=kernels, scoring=scoring, flash=flash if kernels else None)
    for lengths in [[127, 0, 0], [1, 40, 0], [1, 1, 1], [130, 3, 129], [1, 1, 1]]:
        assert layer.run(lengths) < (1e-3 if kernels else 2e-6), lengths


@pytest.mark.parametrize(
    "name", ["static", *(pytest.param(name, marks=FULL) for name in ("kivi", "kitty", "calibrated"))]
)
def test_kernels_with_tables_in_fixed_places_do_the_same(name):
    torch.manual_seed(0)
    layer = Layer(SCHEMES[name], kernels=True)
    with interpreted(), record_specializations() as rehearsed:
        rehearse([layer.blocks], [(HEADS * GROUP, layer.scoring)], layer.tables, layer.packing)
    with record_specializations(makes=True) as launched:
        # Products of two 16-bit parts of each float32 number.
        for lengths in [[127, 0, 0], [1, 40, 0], [1, 1, 1], [130, 0, 129], [1, 1, 1]]:
            assert layer.run(lengths) < 1e-3, lengths
    # No kernel is compiled while requests wait.
    assert not launched.keys() - rehearsed.keys()


@pytest.mark.full
def test_one_request_at_a_time_launches_what_was_rehearsed():
    torch.manual_seed(0)
    layer = Layer(SCHEMES["value window"], kernels=True)
    layer.tables = DecodeTables([layer.blocks], 1, 6)
    with interpreted(), record_specializations() as rehearsed:
        rehearse([layer.blocks], [(HEADS * GROUP, layer.scoring)], layer.tables, layer.packing)
    with record_specializations(makes=True) as launched:
        for lengths in [[255, 0, 0], [1, 0, 0], [1, 0, 0], [130, 0, 0], [1, 0, 0]]:
            assert layer.run(lengths) < 1e-3, lengths
    assert not launched.keys() - rehearsed.keys()


def flash(queries, keys, values, query_ends, key_ends, most_queries, most_keys, scaling, output):
    """What FlashAttention does of its arguments."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    own = [ends.diff().tolist() for ends in (query_ends, key_ends)]
    assert [len(queries), len(keys), len(values)] == [sum(own[0]), sum(own[1]), sum(own[1])]
    assert (most_queries, most_keys) == (max(own[0]), max(own[1]))
    parts = (x.split(lengths) for x, lengths in ((queries, own[0]), (keys, own[1]), (values, own[1])))
    for part, result in zip(zip(*parts, strict=True), output.split(own[0]), strict=True):
        visible = torch.arange(len(part[1])) <= torch.arange(len(part[1]))[-len(part[0]) :, None]
        attended = attention_reference(*(x.transpose(0, 1) for x in part), visible, scaling).output
        result.copy_(attended.transpose(0, 1))


@pytest.mark.parametrize("name", ["kivi", pytest.param("calibrated", marks=FULL), pytest.param("oscar", marks=FULL)])
def test_prompts_may_be_attended_by_another_kernel(name):
    torch.manual_seed(0)
    layer = Layer(SCHEMES[name], kernels=True, flash=flash)
    for lengths in [[127, 0, 0], [1, 40, 0], [130, 3, 129], [1, 1, 1]]:
        assert layer.run(lengths) < 1e-3, lengths


def test_a_request_that_begins_anew_in_other_blocks_is_as_the_first_time():
    """What vLLM does with a request that it had to interrupt for want of memory."""
    torch.manual_seed(0)
    layer = Layer(SCHEMES["kivi"], kernels=False)
    for lengths in [[150, 0, 0], [1, 0, 0], [1, 200, 0]]:
        layer.run(lengths)
    layer.table[0] = layer.table[0].flip(0).clone()
    layer.table[0, :3] = layer.table[2, :3]
    layer.keys[0], layer.values[0] = torch.zeros(2, HEADS, 0, DIM)
    layer.pages.clear()
    assert layer.run([152, 0, 0]) < 2e-6
    for _ in range(110):
        assert layer.run([1, 1, 0]) < 2e-6
