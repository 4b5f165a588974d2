"""Schemes by name, calibrated in a working directory: what `benchmarks/real_model.py` measures."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvconvert.convert.pipeline import calibrate
from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import UsageError
from kvconvert.fidelity.scoring import Decoder
from kvconvert.methods import KVScheme
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.recipes.recipe import Budget, Recipe
from kvconvert.runtime import KVCache

SAMPLES, LENGTH = 32, 512  # of the calibration text
# What a case may say to `calibrate` instead of to the cache.
ARGUMENTS = set(inspect.signature(calibrate).parameters) | set(Budget.__annotations__)
ARGUMENTS -= {"model", "work", "recipe", "device", "restart", "progress", "budget"}
_UNSAFE = re.compile(r"[^\w.=-]+")  # in the name of a directory


@dataclass(frozen=True)
class Case:
    """A preset with changes, as `NAME` or `NAME:field=value,field=value`.

    Attributes:
        name: as it was written.
        preset: a preset of a cache or a recipe.
        fields: the scheme's fields over the preset's, or options of its calibration.
        arguments: keyword arguments of `calibrate`, for instance `samples=8`.
    """

    name: str
    preset: str
    fields: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read what the command line says (UsageError)."""
        preset, _, changes = text.partition(":")
        parts: dict[str, dict[str, Any]] = {"fields": {}, "arguments": {}}
        for change in filter(None, changes.split(",")):
            name, equals, value = change.partition("=")
            if not equals:
                raise UsageError(f"{text}: {change} is not of the form field=value.")
            parts["arguments" if name in ARGUMENTS else "fields"][name] = _value(value)
        return cls(text, preset, **parts)

    def recipe(self, directory: Path) -> Recipe:
        """The recipe, without limits, which leaves the weights alone."""
        if self.fields:
            lines = [f"{name} = {_toml(value)}" for name, value in self.fields.items()]
            file = directory / "recipe.toml"
            file.write_text("\n".join(["[kv]", f'preset = "{self.preset}"', *lines]) + "\n", encoding="utf-8")
            recipe = Recipe.load(str(file))
        else:
            recipe = Recipe.load(self.preset)
        update = {"limits": type(recipe.limits)(), "weights": WeightsRecipe(method="none")}
        return recipe.model_copy(update=update)


@dataclass(frozen=True)
class Calibrated:
    """A model with the cache of a case.

    Attributes:
        decoder: model and cache.
        schemes: its layers' schemes; None for one that keeps the model's own cache.
        plan: calibrated tensors by their names in the KV plan.
    """

    decoder: Decoder
    schemes: tuple[KVScheme | None, ...]
    plan: Mapping[str, torch.Tensor]


class Workshop:
    """Calibrates cases, each in a directory of its own that a later run goes on from.

    Args:
        model: directory of the source model.
        data: calibration text; None takes what ships with kvconvert.
        work: where the directories lie.
        device, dtype: in which models compute.
        restart: calibrate anew.
        calibrate_on: device of the calibrations; None takes `device`'s.
    """

    def __init__(
        self,
        model: Path,
        data: str | None,
        work: Path,
        device: torch.device,
        dtype: torch.dtype,
        restart: bool,
        calibrate_on: str | None = None,
    ):
        self.directory, self.data, self.work, self.restart = model, data, work, restart
        self.device, self.dtype, self.calibrate_on = device, dtype, calibrate_on or device.type
        self._shared: PreTrainedModel | None = None
        self._searched: dict[str, Path] = {}

    def source(self, attention: str | None = None) -> PreTrainedModel:
        """The source model."""
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=self.dtype, attn_implementation=attention)
        return model.to(self.device).eval()

    def cache_of(self, case: Case) -> Calibrated:
        """The source model, its weights as they are, with the case's cache; rotations of values are made online."""
        store = self.calibrate(case)
        layers = range(store.state.num_layers)
        plan = {name: tensor for layer in layers for name, tensor in store.layer_plan(layer).items()}
        found = [store.layer_record(layer).scheme() for layer in layers]
        schemes = tuple(None if s is None else s.with_online_rotation() for s in found)
        if self._shared is None:
            self._shared = self.source("kvconvert")
        model = self._shared
        return Calibrated(Decoder(model, lambda: KVCache(model.config, schemes, plan=plan)), schemes, plan)

    def calibrate(self, case: Case) -> WorkDir:
        """The finished working directory of a case; one that is there already is taken."""
        directory = self.directory_of(case)
        directory.mkdir(parents=True, exist_ok=True)
        arguments = {"samples": SAMPLES, "seq_len": LENGTH, "data": self.data} | dict(case.arguments)
        search = self.search_of(case)
        if "auto_from" not in arguments and search in self._searched:
            # Budgets of one search share what was measured of single layers.
            arguments["auto_from"] = self._searched[search]
        found = calibrate(
            self.directory,
            directory / "work",
            recipe=case.recipe(directory),
            device=self.calibrate_on,
            restart=self.restart,
            progress=False,
            **arguments,
        )
        if case.preset == "auto":
            self._searched.setdefault(search, found.path)
        return found

    def directory_of(self, case: Case) -> Path:
        """Where a case is calibrated."""
        return self.work / f"cache-{_UNSAFE.sub('_', case.name)}"

    def searched(self, case: Case, work: Path) -> None:
        """Take the measurements of a finished search for cases that differ in the budget alone."""
        self._searched.setdefault(self.search_of(case), work)

    @staticmethod
    def search_of(case: Case) -> str:
        """A key shared by searches that differ in the budget alone."""
        others = {k: v for k, v in case.arguments.items() if k not in ("kv_bits", "kv_bytes_per_token")}
        return f"{case.preset} {case.fields} {others}"


def _value(text: str) -> Any:
    """A number, a boolean or a list as TOML writes it; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
