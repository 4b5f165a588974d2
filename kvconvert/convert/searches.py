"""The searches of a recipe, by measuring the whole model: the cache's schemes, and the widths of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvconvert.auto.allocation import read_allocation, read_weight_allocation
from kvconvert.auto.model import SearchRun, SimulatedModel
from kvconvert.auto.search import CLIP_ROWS, SearchTask, allocated_recipe, find_allocation
from kvconvert.auto.weight_widths import allocated_widths, find_widths, text_size, weight_units
from kvconvert.calibration.protocol import LayerJob
from kvconvert.calibration.simulated_attention import SIMULATED_ATTENTION
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.workdir import WorkDir
from kvconvert.data.mixture import Sources, load_held_out_mixture
from kvconvert.data.text import TokenData, load_token_samples
from kvconvert.models.processors import load_tokenizer
from kvconvert.models.source import float_dtype
from kvconvert.recipes.recipe import Recipe

FLOAT32_SHARE = 0.4  # of a GPU's memory that float32 weights may take; else the source's dtype


@dataclass(frozen=True)
class Searches:
    """What both searches of a calibration share.

    Attributes:
        runner: of the model; its device is where everything is computed.
        directory: where measurements are committed, and are found by a later run.
        tokens: calibration samples; candidates are measured on text that these leave over.
        data, seed: of those samples.
        say: shows a message.
        progress: show bars.
    """

    runner: LayerRunner
    directory: WorkDir
    tokens: TokenData
    data: Sources
    seed: int
    say: Callable[[str], None]
    progress: bool

    def cache(self, recipe: Recipe, task: SearchTask) -> Recipe:
        """The recipe with the scheme of every searched layer stated."""
        found = read_allocation(self.directory)
        if found is None:
            data, tokens = self.data, self.tokens
            if tokens.extras:  # images: candidates are measured on text all the same
                tokenizer = load_tokenizer(self.runner.source.directory)
                data, tokens = None, load_token_samples(None, tokenizer, CLIP_ROWS, tokens.ids.shape[1], self.seed)
            run = self._run(data, tokens, task.text_rows, task.text_length)
            found = find_allocation(task, recipe, run, tokens.ids[:CLIP_ROWS])
        return allocated_recipe(recipe, task, found)

    def widths(self, recipe: Recipe, jobs: Sequence[LayerJob]) -> Recipe:
        """The recipe with the width of every Linear stated."""
        found = read_weight_allocation(self.directory)
        if found is None:
            size = text_size(self.runner.config, self.runner.device)
            run = self._run(None if self.tokens.extras else self.data, self.tokens, *size)
            found = find_widths(weight_units(self.runner.model, jobs), recipe.weights, run)
        return allocated_widths(recipe, found)

    def _run(self, data: Sources, tokens: TokenData, rows: int, length: int) -> SearchRun:
        """The source model, and text of this size beside the calibration samples."""
        runner, source = self.runner, self.runner.source
        apart = (tokens.info.samples, tokens.info.length)
        text = load_held_out_mixture(data, load_tokenizer(source.directory), rows, length, self.seed, apart)
        model = source.load(_dtype(runner), attn_implementation=SIMULATED_ATTENTION)
        model = model.eval().requires_grad_(False).to(runner.device)
        layers = () if runner.adapter is None else model.get_submodule(runner.adapter.layers)
        return SearchRun(SimulatedModel(model, layers), text, self.directory, self.say, self.progress)


def _dtype(runner: LayerRunner) -> torch.dtype:
    """float32, for the divergences of single layers are small; the source's dtype where that does not fit a GPU."""
    if runner.device.type != "cuda":
        return torch.float32
    parameters = sum(parameter.numel() for parameter in runner.model.parameters())
    memory = torch.cuda.get_device_properties(runner.device).total_memory
    return torch.float32 if 4 * parameters <= FLOAT32_SHARE * memory else float_dtype(runner.source)
