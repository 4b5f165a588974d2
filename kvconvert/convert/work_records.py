"""What a working directory writes down: what a calibration was started from, and what became of each layer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import Field

from kvconvert.bundle.manifest import MAX_LAYERS, LayerPlan, ModuleCoverage
from kvconvert.io.records import DataInfo, Record, SourceInfo

WORK_FORMAT = 2


class WorkState(Record):
    """What a calibration was started from.

    Attributes:
        format: of the working directory.
        fingerprint: SHA-256 over `inputs()`.
        versions: of kvconvert and the libraries that shape its results.
        recipe: as plain values.
        source, data: fingerprints of the model and of the calibration tokens.
        model: the model as it was named, and `directory` where it was found; neither enters the fingerprint.
        seed, device: of the calibration.
        num_layers: decoder layers.
        adapter: model type, or None where the structure of the layers is not known.
        kept_tensors: source tensors that no layer file replaces: an exporter copies them as they are.
        kept_modules: coverage of the modules that own them.
        transforms: changes to the weights, in the order in which they are applied.
        complete: every layer is committed.
    """

    format: int = WORK_FORMAT
    fingerprint: str = ""
    versions: dict[str, str]
    recipe: dict[str, Any]
    source: SourceInfo
    model: str
    directory: str
    data: DataInfo
    seed: int
    device: str
    num_layers: int = Field(ge=0, le=MAX_LAYERS)
    adapter: str | None
    kept_tensors: list[str]
    kept_modules: list[ModuleCoverage]
    transforms: list[str]
    complete: bool = False

    def inputs(self) -> dict[str, Any]:
        """Everything that the result depends on, flattened, with readable keys."""
        inputs: dict[str, Any] = {"the model's config.json": self.source.config_sha256}
        inputs |= {f"the model's {file}": digest for file, digest in self.source.weights_sha256.items()}
        inputs |= {
            "the number of samples": self.data.samples,
            "the sample length": self.data.length,
            "the seed": self.seed,
            "the calibration data": self.data.sha256,
            "the device": self.device,
        }
        inputs |= {f"the version of {name}": version for name, version in self.versions.items()}
        for table, values in self.recipe.items():
            if isinstance(values, dict):
                inputs |= {f"the recipe's {table}.{key}": value for key, value in values.items()}
            else:
                inputs[f"the recipe's {table}"] = values
        return inputs

    def sealed(self) -> WorkState:
        """The same state with its fingerprint computed."""
        text = json.dumps(self.inputs(), sort_keys=True)
        return self.model_copy(update={"fingerprint": hashlib.sha256(text.encode()).hexdigest()})


class LayerRecord(LayerPlan):
    """One decoder layer: its plan as the bundle will hold it, and the rest of what calibration made of it.

    Attributes:
        modules: coverage of every module of the layer that owns tensors.
        files: SHA-256 of the layer's files of tensors by suffix, filled in by `WorkDir.commit_layer`.
    """

    modules: list[ModuleCoverage]
    files: dict[str, str] = Field(default_factory=dict)

    def plan(self) -> LayerPlan:
        """The layer's entry in the manifest."""
        return LayerPlan(**{name: getattr(self, name) for name in LayerPlan.model_fields})
