"""`calibrate`: from a checkpoint to a working directory of converted layers, one decoder layer in memory at a time.

The model is built without weights. For each decoder layer in turn: read its weights, run the calibration sequences
through it in float32 while the passes observe, let them solve and apply, write the result, free the layer. The next
layer's input is the output of the UNCHANGED layer, kept on disk. What concerns all layers at once (one pair of taus,
the allocation of budgets) is decided from the stored measurements when the last layer is committed. Peak memory is a
couple of layers, the embeddings and one small batch of activations, regardless of the number of layers and samples.

Where torchrun starts several processes, each runs its share of the sequences through every layer and all get the
statistics of all (`kvconvert.calibration.ranks`); rank 0 holds the directory and writes everything but hidden states.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvconvert.arguments import Count, Folder, ModelPlace, SampleLength, checked
from kvconvert.auto import KeptLinears, read_allocation, read_kept, read_weight_allocation
from kvconvert.auto.model import SearchRun, SimulatedModel
from kvconvert.auto.search import (
    CLIP_ROWS,
    SearchTask,
    allocated_recipe,
    find_allocation,
    search_seconds,
    search_task,
)
from kvconvert.auto.weight_widths import (
    GPU_KEPT_TEXT,
    allocated_widths,
    budget_of,
    find_kept,
    find_widths,
    kept_recipe,
    kept_seconds,
    kept_text,
    text_size,
    weight_units,
)
from kvconvert.bundle.manifest import ModuleCoverage
from kvconvert.calibration.protocol import LayerJob
from kvconvert.calibration.ranks import Ranks, joined_ranks, local_device
from kvconvert.calibration.simulated_attention import SIMULATED_ATTENTION
from kvconvert.convert.checks import (
    check_layers_fit,
    check_packed,
    check_purpose,
    check_recipe,
    check_widths,
    fitted_weights,
)
from kvconvert.convert.discovery import Architecture
from kvconvert.convert.input_capture import CalibrationInputs
from kvconvert.convert.layer_calibration import (
    LayerCalibration,
    module_kind,
    pairs_models,
    untouched_record,
)
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.passes import layer_jobs, resolve_layers
from kvconvert.convert.scores import KVCONVERT_ATTENTION, predicts, rows_read, scorer_seconds, with_scorers
from kvconvert.convert.work_files import check_measured, check_place
from kvconvert.convert.workdir import WorkDir, WorkState
from kvconvert.data.samples import load_held_out_mixture, load_mixture, load_samples
from kvconvert.data.sources import Data, Sources
from kvconvert.data.text import TokenData, with_random_tokens
from kvconvert.errors import UnsupportedModelError, UsageError, counted
from kvconvert.io.process import release_free_memory
from kvconvert.io.progress import loading_bars, progress_bar
from kvconvert.io.records import DataInfo
from kvconvert.io.tensorfile import Mapped
from kvconvert.io.tensorheader import nbytes
from kvconvert.methods.awq import auto_group_sizes
from kvconvert.models.configuration import supports_images
from kvconvert.models.devices import Device, choose_device
from kvconvert.models.processors import load_tokenizer
from kvconvert.models.source import SourceModel, float_dtype, open_source
from kvconvert.recipes.recipe import Budget, Recipe, RecipeNamed, WeightsRecipe
from kvconvert.version import __version__

logger = logging.getLogger(__name__)

FLOAT32_SHARE = 0.4  # of a GPU's memory that float32 weights may take; else the source's dtype


@checked
def calibrate(
    model: ModelPlace,
    work: Folder,
    *,
    recipe: RecipeNamed = "default",
    data: Data | None = None,
    samples: Count | None = None,
    seq_len: SampleLength | None = None,
    seed: int = 0,
    device: Device | None = None,
    restart: bool = False,
    progress: bool = True,
    auto_from: Folder | None = None,
    **budget: Unpack[Budget],
) -> WorkDir:
    """Convert every decoder layer of a model into a working directory, or go on where an earlier run stopped.

    Args:
        model: directory or Hub id.
        work: working directory, absent, empty, or begun from the same inputs.
        recipe: a `Recipe`, the name of a preset, or the path of a recipe file (see `Recipe.load`).
        data: calibration data: a file, a directory or a Hub data set (see `kvconvert.data`), or a list of them, each
            with its weight as in "chat.jsonl=3". None takes what ships with kvconvert: text, or drawings with captions
            for a vision-language model.
        samples: number of calibration sequences; None takes 16 of 2,048 tokens, 24 for small chat models, or up to 64
            of shorter ones.
        seq_len: tokens in each; None takes 2,048, or what an image needs.
        seed: the seed of the choice of samples.
        device: on which layers are computed, "cpu" or "cuda"; None takes a GPU if there is one.
        restart: discard what `work` holds instead of going on from there.
        progress: show a progress bar and messages on stderr.
        auto_from: finished working directory of the same search with another budget, whose measurements are taken.
        budget: `kv_bits`, `kv_bytes_per_token`, `context`, `auto_tokens` and `weight_bits`, see `Budget`.

    Returns:
        the finished working directory.

    Raises:
        KvconvertError: one of its children, for everything that can be wrong with the input; nothing half written
            stays.
    """
    if unknown := budget.keys() - Budget.__annotations__.keys():
        raise TypeError(f"calibrate() got an unexpected keyword argument {min(unknown)!r}")
    target = local_device(choose_device(device))
    with joined_ranks(target) as ranks:
        with ranks.together():
            recipe = Recipe.of(recipe)
            recipe = recipe.with_budget(**budget)
            if ranks.size > 1 and (recipe.auto is not None or recipe.weights.average_bits is not None):
                raise UsageError(
                    f"The recipe {recipe.name} searches in one process, and torchrun started {ranks.size}; calibrate "
                    "with it without torchrun."
                )
            if auto_from is not None:
                check_measured(auto_from, recipe)
            if ranks.is_first:
                check_place(work)
            progress = progress and ranks.is_first
            model, data = str(model), str(data) if isinstance(data, Path) else data
            source = open_source(model)
            check_purpose(source.config, recipe)
            runner = make_runner(source, recipe.weights, target)
            runner.check_headers()
            check_recipe(runner, recipe)
            check_packed(runner, recipe)
            if target.type == "cuda":
                check_layers_fit(runner, torch.cuda.get_device_properties(target).total_memory)
            if runner.architecture is not None:
                recipe = with_fitted_weights(runner, recipe, progress)
            jobs = layer_jobs(runner, recipe)
            if ranks.size > 1 and predicts(jobs):
                raise UsageError(
                    f"The recipe {recipe.name} fits what predicts scores in one process, and torchrun started "
                    f"{ranks.size}; calibrate with it without torchrun."
                )
            task = None if recipe.auto is None else search_task(runner.config, jobs, recipe, target)
            if recipe.weights.average_bits is not None:
                budget_of(weight_units(runner.model, jobs), recipe.weights.average_bits)
            tokens = load_samples(source, data, samples, seq_len, seed, Mapped.near(Path(work)))
            if pairs_models(jobs) and not tokens.extras:
                vocabulary = runner.config.vocab_size
                tokens = with_random_tokens(tokens, load_tokenizer(source.directory), vocabulary, seed)
            shares = ranks.shares(len(tokens.ids) - tokens.random, runner.batch_size(tokens.ids.shape[1]))
            shares[-1] = (shares[-1][0], len(tokens.ids))
            if supports_images(source.config) and not tokens.info.images:
                _say(f"Calibrating with text alone: {tokens.info.source} holds no images.", progress)
            for warning in tokens.warnings:
                _say(warning, progress)
            state = _initial_state(model, runner, recipe, jobs, tokens.info, seed, progress)
            measured = None if auto_from is None else WorkDir.open(auto_from)
            if measured is not None:
                measured.searched_for(state)
        _check_same_inputs(ranks, state, work)
        with ExitStack() as stack:
            with ranks.together():
                if ranks.is_first:
                    directory = stack.enter_context(WorkDir.writing(work, state, restart))
                    directory.remove_other_hidden(shares)
                else:
                    directory = WorkDir(Path(work), state.sealed())
            directory.share_samples(*shares[ranks.rank])
            if ranks.of_first(directory.state.complete):
                layers = directory.state.num_layers
                _say(f"{directory.path} is already complete ({counted(layers, 'layer')}); nothing to do.", progress)
            else:
                if measured is not None:
                    directory.adopt_measurements(measured)
                say = partial(_say, progress=progress)
                searches = Searches(runner, directory, tokens, data, seed, say, progress)
                _calibrate_layers(searches, recipe, jobs, task, ranks)
            return directory if ranks.is_first else WorkDir.open(work)


def _check_same_inputs(ranks: Ranks, state: WorkState, work: str | Path) -> None:
    """Refuse processes that would calibrate different things together."""
    first, *others = ranks.gather_list([state.inputs() | {"the working directory": str(Path(work).resolve())}])
    with ranks.together():
        for rank, inputs in enumerate(others, 1):
            changed = sorted(key for key in first.keys() | inputs.keys() if first.get(key) != inputs.get(key))
            if changed:
                raise UsageError(
                    f"Ranks 0 and {rank} were given different inputs: {changed[0]} differs; start every process with "
                    "the same arguments, files and versions."
                )


def _calibrate_layers(
    searches: Searches, recipe: Recipe, jobs: list[LayerJob], task: SearchTask | None, ranks: Ranks
) -> None:
    """Everything that a working directory still lacks; its searches decide what the layers' jobs are."""
    runner, directory, tokens = searches.runner, searches.directory, searches.tokens
    source, count, todo = runner.source, directory.state.num_layers, []
    with ranks.together():
        if ranks.is_first:
            for index in directory.damaged_layers():
                searches.say(f"Layer {index} in {directory.path} is damaged and is computed again.")
            todo = directory.uncommitted()
            if len(todo) < count:
                searches.say(
                    f"Going on in {directory.path}, where {count - len(todo)} of {counted(count, 'layer')} are done."
                )
            if ranks.size > 1:  # whose other ranks have to be told
                source.check_finite(directory.state.kept_tensors)
    todo = ranks.of_first(todo)
    if task is not None:
        recipe = searches.cache(recipe, task)
    if recipe.weights.average_bits is not None:
        recipe = searches.widths(recipe, jobs)
    if task is not None or recipe.weights.average_bits is not None:
        jobs = layer_jobs(runner, recipe)
    if recipe.weights.kept_share:
        with ranks.together():
            widened = kept_recipe(recipe, searches.kept(recipe, jobs)) if ranks.is_first else recipe
        jobs = layer_jobs(runner, ranks.of_first(widened))
    if todo and predicts(jobs):
        jobs = searches.scorers(jobs)
    inputs = CalibrationInputs(tokens.ids, tokens.extras, tokens.visual, directory.mapped(), tokens.random)
    if runner.architecture is not None:
        runner.begin(inputs)
    done = count - len(todo)
    with (
        ThreadPoolExecutor(1) as executor,
        progress_bar(desc="layers", unit="layer", initial=done, total=count, shown=searches.progress) as bar,
    ):
        layers = LayerCalibration(runner, directory, jobs, inputs, ranks, executor, show=bar.set_postfix_str)
        if ranks.size == 1:  # a gigabyte or two of an 8B model's
            layers.running.append(executor.submit(source.check_finite, directory.state.kept_tensors))
        for index in todo:
            if runner.architecture is not None:
                layers.run(index)
            elif ranks.is_first:
                directory.commit_layer(index, {}, {}, untouched_record(jobs[index]))
            bar.update()
            release_free_memory()
        layers.wait()
    with ranks.together():
        source.stamps.check()
    with ranks.together():
        if ranks.is_first:
            records = [directory.layer_record(index) for index in range(count)]
            for record in resolve_layers(recipe, records, directory.layer_plan):
                directory.replace_record(record.index, record)
            directory.finish()


def make_runner(source: SourceModel, weights: WeightsRecipe, device: torch.device) -> LayerRunner:
    """A runner that knows the layers' structure, without which a recipe that keeps weights does where none is found."""
    try:
        return LayerRunner(source, device)
    except UnsupportedModelError as error:
        if weights.method != "none":
            raise
        logger.warning("The cache is converted without calibration. %s", error)
    return LayerRunner(source, device, discovers=False)


def with_fitted_weights(runner: LayerRunner, recipe: Recipe, progress: bool) -> Recipe:
    """The recipe with a method and a group size of weights that fit the model."""
    check_widths(runner, recipe.weights)
    weights = fitted_weights(runner, recipe.weights)
    if weights.group_size != recipe.weights.group_size:
        hidden, sizes = runner.config.hidden_size, auto_group_sizes(runner.config.hidden_size)
        chosen = "where they divide" if weights.group_size == sizes[0] else f"where {sizes[0]} do not divide"
        _say(
            f"Weights in groups of {weights.group_size}, as auto chooses for a hidden size of {hidden} {chosen} "
            "the inputs of every quantized Linear.",
            progress,
        )
    return recipe.model_copy(update={"weights": weights})


def _initial_state(
    model: str,
    runner: LayerRunner,
    recipe: Recipe,
    jobs: Sequence[LayerJob],
    data: DataInfo,
    seed: int,
    progress: bool,
) -> WorkState:
    source, found = runner.source, runner.architecture
    prefix = f"{found.layers}." if found else None
    names = source.tensor_names
    kept = kept_tensors(runner, recipe.weights)
    modules = [
        ModuleCoverage(
            name=name, kind=module_kind(module), method="kept", reason=_kept_reason(name, found)
        ).stored_under(names.of_module(name))
        for name, module in runner.model.named_modules()
        if (prefix is None or not name.startswith(prefix)) and any(True for _ in module.parameters(recurse=False))
    ]
    folds = [change for job in jobs if job.scheme is not None for change in job.scheme.transforms()]
    transforms = [*dict.fromkeys(folds), *recipe.weights.transforms()]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors")}
    return WorkState(
        versions={"kvconvert": __version__, **versions},
        recipe=recipe.to_dict(),
        source=source.info(progress),
        model=model,
        directory=str(source.location.resolve()),
        data=data,
        seed=seed,
        device=runner.device.type,
        num_layers=runner.num_layers,
        adapter=found.model_type if found else None,
        kept_tensors=kept,
        kept_modules=modules,
        transforms=transforms,
    )


def kept_tensors(runner: LayerRunner, weights: WeightsRecipe) -> list[str]:
    """Tensors, by the checkpoint's names, that export copies from the source."""
    # A checkpoint may hold more layers than the model has (for predicting several tokens); they are copied too.
    layers = () if runner.architecture is None else tuple(f"{runner.layer_name(i)}." for i in range(runner.num_layers))
    copied = () if weights.quantizes else runner.expert_modules()
    names = runner.source.tensor_names
    stored = (own for name, own in names.stored.items() if not name.startswith(layers) or name.startswith(copied))
    return sorted({part for own in stored for part in names.made.get(own, (own,))})


def kept_bytes(runner: LayerRunner, kept: list[str]) -> int:
    """Bytes of tensors that a bundle takes over from the source as they are."""
    return sum(nbytes(runner.source.tensors[name]) for name in kept)


def _kept_reason(name: str, found: Architecture | None) -> str:
    """Why a module outside the decoder layers keeps its weights."""
    if found is None:
        return "the recipe keeps weights"
    language = found.layers.rpartition(".")[0]
    if name.startswith(f"{found.base}.") and not f"{name}.".startswith(f"{language}."):
        return "outside the language model, which alone is quantized"
    return "outside the decoder layers"


def _say(message: str, progress: bool) -> None:
    logger.info(message)
    if progress:
        print(message, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Searches:
    """State that both searches of a calibration share.

    Attributes:
        runner: the runner of the model; its device is where everything is computed.
        directory: where measurements are committed, and are found by a later run.
        tokens: calibration samples; candidates are measured on text that these leave over.
        data, seed: source and seed of those samples.
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
            found = find_allocation(task, recipe, *self._cache_run(task))
        return allocated_recipe(recipe, task, found)

    def cache_seconds(self, recipe: Recipe, task: SearchTask) -> float:
        """How long `cache` will take: everything is read, and one layer measured."""
        begun = time.perf_counter()
        run, samples = self._cache_run(task)
        return time.perf_counter() - begun + search_seconds(task, recipe, run, samples)

    def _cache_run(self, task: SearchTask) -> tuple[SearchRun, Tensor]:
        """The model and text that the cache's search measures with, and the sequences for its clip ratios."""
        data, tokens = self.data, self.tokens
        if tokens.extras:  # images: candidates are measured on text all the same
            tokenizer = load_tokenizer(self.runner.source.directory)
            data, tokens = None, load_mixture(None, tokenizer, CLIP_ROWS, tokens.ids.shape[1], self.seed)
        return self._run(data, tokens, task.text_rows, task.text_length), tokens.ids[: len(tokens.ids) - tokens.random][
            :CLIP_ROWS
        ]

    def widths(self, recipe: Recipe, jobs: Sequence[LayerJob]) -> Recipe:
        """The recipe with the width of every Linear stated."""
        found = read_weight_allocation(self.directory)
        if found is None:
            size = text_size(self.runner.config, self.runner.device)
            run = self._run(None if self.tokens.extras else self.data, self.tokens, *size)
            found = find_widths(weight_units(self.runner.model, jobs), recipe.weights, run)
        return allocated_widths(recipe, found)

    def kept(self, recipe: Recipe, jobs: Sequence[LayerJob]) -> KeptLinears:
        """The Linears that stay at 16 bits, see `find_kept`."""
        if (found := read_kept(self.directory)) is not None:
            return found
        runner = self.runner
        others = kept_bytes(runner, kept_tensors(runner, recipe.weights))
        return find_kept(weight_units(runner.model, jobs), recipe.weights, others, self._kept_run())

    def kept_seconds(self, recipe: Recipe, jobs: Sequence[LayerJob]) -> float:
        """How long `kept` will take."""
        begun = time.perf_counter()
        run = self._kept_run()
        return time.perf_counter() - begun + kept_seconds(weight_units(self.runner.model, jobs), recipe.weights, run)

    def _kept_run(self) -> SearchRun:
        """The source model, and a part of the calibration samples."""
        runner, tokens = self.runner, self.tokens
        text = tokens.ids[: len(tokens.ids) - tokens.random]
        if tokens.extras:  # images: measured on text all the same
            tokenizer = load_tokenizer(runner.source.directory)
            text = load_mixture(None, tokenizer, GPU_KEPT_TEXT[0], tokens.ids.shape[1], self.seed).ids
        return self._run_on(replace(tokens, ids=kept_text(text, runner.device)))

    def scorers(self, jobs: list[LayerJob]) -> list[LayerJob]:
        """The jobs with networks that predict scores, fitted to the samples and to text that they leave over."""
        return with_scorers(jobs, *self._scorer_run(), self.seed, self.say, self.progress)

    def scorer_seconds(self, jobs: list[LayerJob]) -> float:
        """How long `scorers` will take."""
        return scorer_seconds(jobs, *self._scorer_run(), self.seed)

    def _scorer_run(self) -> tuple[PreTrainedModel, Tensor]:
        """The source model, and the tokens that it reads twice."""
        runner, tokens = self.runner, self.tokens
        ids = tokens.ids[: len(tokens.ids) - tokens.random]
        rows = rows_read(ids.shape[1], runner.device)
        if rows > len(ids) and not tokens.extras:
            apart = (tokens.info.samples, tokens.info.length)
            tokenizer = load_tokenizer(runner.source.directory)
            more = load_held_out_mixture(self.data, tokenizer, rows - len(ids), ids.shape[1], self.seed, apart)
            ids = torch.cat([ids, more.ids])
        with loading_bars(self.progress):
            dtype = float_dtype(runner.source) if runner.device.type == "cuda" else torch.float32
            model = runner.source.load(dtype, attn_implementation=KVCONVERT_ATTENTION)
        return model.eval().requires_grad_(False).to(runner.device), ids[:rows]

    def _run(self, data: Sources, tokens: TokenData, rows: int, length: int) -> SearchRun:
        """The source model, and text of this size beside the calibration samples."""
        source = self.runner.source
        apart = (tokens.info.samples, tokens.info.length)
        text = load_held_out_mixture(data, load_tokenizer(source.directory), rows, length, self.seed, apart)
        return self._run_on(text, attn_implementation=SIMULATED_ATTENTION)

    def _run_on(self, text: TokenData, **options: str) -> SearchRun:
        """The source model, loaded with these options, and this text."""
        runner = self.runner
        with loading_bars(self.progress):
            model = runner.source.load(_dtype(runner), **options)
        model = model.eval().requires_grad_(False).to(runner.device)
        layers = () if runner.architecture is None else model.get_submodule(runner.architecture.layers)
        return SearchRun(SimulatedModel(model, layers), text, self.directory, self.say, self.progress)


def _dtype(runner: LayerRunner) -> torch.dtype:
    """float32, for the divergences of single layers are small; the source's dtype where that does not fit a GPU."""
    if runner.device.type != "cuda":
        return torch.float32
    parameters = sum(parameter.numel() for parameter in runner.model.parameters())
    memory = torch.cuda.get_device_properties(runner.device).total_memory
    return torch.float32 if 4 * parameters <= FLOAT32_SHARE * memory else float_dtype(runner.source)
