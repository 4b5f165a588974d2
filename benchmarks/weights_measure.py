"""How `benchmarks/weights.py` measures one case: quantize layer by layer, compare logits with the source's."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peers
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvconvert.calibration.protocol import LayerJob, LayerWork
from kvconvert.calibration.weight_grid import WeightGrid
from kvconvert.convert.input_capture import CalibrationInputs
from kvconvert.convert.layer_runner import LayerRunner, RunnerInputs
from kvconvert.convert.passes import make_passes
from kvconvert.data.samples import load_mixture
from kvconvert.data.sources import Sources
from kvconvert.data.text import with_random_tokens
from kvconvert.errors import UsageError
from kvconvert.fidelity.scoring import bootstrap_mean
from kvconvert.methods import KVCalibration
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.models.source import float_dtype, open_source

SAMPLES, LENGTH = 64, 512  # of the calibration text: the defaults of `kvconvert calibrate`


@dataclass(frozen=True)
class Case:
    """A method with changes, as `NAME` or `NAME:field=value,field=value`.

    Attributes:
        name: method and everything that differs from the defaults.
        weights: method, width and groups.
        samples, length: number and length of the samples of the calibration text.
        corrected: compensated weights make up for earlier layers too, as conversions do.
        peer: program and method, "llm-compressor/gptq", where another program quantizes; of `weights` width and groups
            count then.
        texts: names of .txt files to calibrate on, in equal shares; none takes the usual text.
    """

    name: str
    weights: WeightsRecipe
    samples: int
    length: int
    corrected: bool = True
    texts: tuple[str, ...] = ()
    peer: str = ""

    @classmethod
    def parse(cls, text: str, group_size: int) -> Case:
        """Read what the command line says (UsageError)."""
        method, _, changes = text.partition(":")
        peer = method if "/" in method else ""
        fields: dict[str, Any] = {"method": "gptq" if peer else method, "bits": 4, "group_size": group_size}
        default = {"samples": SAMPLES, "length": LENGTH, "corrected": True}
        sizes, texts = dict(default), ""
        for change in filter(None, changes.split(",")):
            name, equals, value = change.partition("=")
            if not equals:
                raise UsageError(f"{text}: {change} is not of the form field=value.")
            if name == "texts":
                texts = value
            else:
                (sizes if name in sizes else fields)[name] = _value(value)
        rest = {k: v for k, v in (fields | sizes).items() if k != "method"}
        said = ",".join(f"{name}={value}" for name, value in rest.items() if default.get(name) != value)
        said += f",texts={texts}" if texts else ""
        texts = tuple(filter(None, texts.split("+")))
        return cls(f"{method}:{said}", WeightsRecipe(**fields), **sizes, texts=texts, peer=peer)

    def values(self) -> dict[str, Any]:
        """As plain values."""
        return (
            self.weights.model_dump()
            | {"samples": self.samples, "length": self.length, "corrected": self.corrected, "texts": self.texts}
            | ({"method": self.peer, "corrected": False} if self.peer else {})
        )


def _value(text: str) -> int | bool | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else text


@dataclass
class States:
    """Hidden states in memory, read like `kvconvert.convert.input_capture.HiddenStates`."""

    values: Tensor
    first: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        return tuple(self.values.shape)

    def read(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]


@torch.no_grad()
def quantized_model(directory: Path, case: Case, calibration: Sources, seed: int, device: str) -> PreTrainedModel:
    """The model in float32 with the weights that a conversion would store, dequantized; dense models only."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    data = load_mixture(calibration, tokenizer, case.samples, case.length, seed)
    source = open_source(str(directory))
    runner = LayerRunner(source, torch.device(device))
    structures = [runner.structure(index) for index in range(runner.num_layers)]
    paired = case.corrected and case.weights.compensates and all(structure.writers for structure in structures)
    if paired:
        data = with_random_tokens(data, tokenizer, runner.config.vocab_size, seed)
    inputs = CalibrationInputs(data.ids, random=data.random)
    runner.begin(inputs)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    states = States(torch.cat(list(runner.first_input())))
    quantized = states  # the input of a layer in the model quantized so far
    for index, structure in enumerate(structures):
        name = runner.layer_name(index)
        bits = dict.fromkeys(structure.linears, case.weights.bits)
        passes = make_passes(LayerJob(index, name, case.weights, None, KVCalibration(), structure, bits=bits))
        layer, _ = runner.layer(index)
        shape = inputs.text, data.ids.shape[1]
        work = LayerWork(name, layer, structure, *shape, dtype=float_dtype(source), bits=bits)
        if paired:
            work.paired = RunnerInputs(runner, index, structure, quantized, lambda tensor: tensor)
        outputs = []
        with ExitStack() as hooks:
            for calibration_pass in passes:
                hooks.enter_context(calibration_pass.observe(work))
            outputs = [output for *_, output in runner.forward(layer, states, index)] if passes else []
        for calibration_pass in passes:
            calibration_pass.solve(work)
            calibration_pass.apply(work)
        for linear in structure.linears:
            if linear not in work.grids:
                weight = work.layer.get_submodule(linear).weight
                weight.copy_(WeightGrid.of(weight, case.weights.bits, case.weights.group_size).round(weight))
        model.get_submodule(name).load_state_dict(work.layer.state_dict())
        states = States(torch.cat(outputs)) if outputs else states
        if paired:
            quantized = States(torch.cat(list(work.paired.outputs(layer))))
    return model


def peer_model(
    directory: Path, case: Case, calibration: Sources, seed: int, device: str, python: Path, threads: int
) -> PreTrainedModel:
    """The same of another program's weights, calibrated on the same token ids, eight sequences at a time.

    Args:
        directory, case, calibration, seed, device: as in `quantized_model`.
        python: interpreter of the program's environment.
        threads: the threads of its process.
    """
    program, _, method = case.peer.partition("/")
    ids = load_mixture(calibration, AutoTokenizer.from_pretrained(directory), case.samples, case.length, seed).ids
    settings = {"method": method, "bits": case.weights.bits, "group_size": case.weights.group_size, "batch_size": 8}
    settings |= {"dtype": "float32", "device": device}
    found = peers.weights(program, python, directory, ids, settings, threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    peers.replace_weights(model, found, program)
    return model.to(device).eval()


class SourceScores:
    """The source's log-probabilities of a text, one file per segment: they are compared with again and again.

    Args:
        directory: the directory of the model.
        ids: int64 [segments, length + 1]; all but the first token are scored.
        work: where the files lie.
        device: on which models compute.
    """

    def __init__(self, directory: Path, ids: Tensor, work: Path, device: str) -> None:
        self.ids, self._device = ids, device
        key = hashlib.sha256(repr((str(directory.resolve()), device, ids.tolist())).encode()).hexdigest()[:16]
        self._folder = work / key
        self._folder.mkdir(parents=True, exist_ok=True)
        missing = [i for i in range(len(ids)) if not self._file(i).is_file()]
        if missing:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
            for index in missing:
                partial = self._file(index).with_suffix(".partial")
                torch.save(_log_probabilities(model, ids[index]).cpu(), partial)
                partial.rename(self._file(index))
        self.perplexity = float(torch.stack([_nll(self._of(i), ids[i]) for i in range(len(ids))]).mean().exp())

    def _file(self, index: int) -> Path:
        return self._folder / f"{index}.pt"

    def _of(self, index: int) -> Tensor:
        return torch.load(self._file(index), mmap=True)

    def compare(self, model: PreTrainedModel) -> dict[str, Any]:
        """KL from the source, in nats per token, and the likelihood, per segment and on average."""
        kl, nll, agrees = [], [], []
        for index, ids in enumerate(self.ids):
            reference, other = self._of(index).to(self._device), _log_probabilities(model, ids)
            kl.append((reference.exp() * (reference - other)).sum(-1).mean(dtype=torch.float64))
            nll.append(_nll(other, ids))
            agrees.append((reference.argmax(-1) == other.argmax(-1)).double().mean())
        kl, nll, agrees = ([value.cpu() for value in values] for values in (kl, nll, agrees))
        return {
            "kl": asdict(bootstrap_mean(torch.stack(kl), 0)),
            "perplexity": float(torch.stack(nll).mean().exp()),
            "top1_agreement": float(torch.stack(agrees).mean()),
            "kl_by_segment": torch.stack(kl).tolist(),
            "nll_by_segment": torch.stack(nll).tolist(),
        }


def _log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids[None, :-1].to(model.device), use_cache=False).logits[0].float().log_softmax(-1)


def _nll(log_probabilities: Tensor, ids: Tensor) -> Tensor:
    return -log_probabilities.gather(1, ids[1:, None].to(log_probabilities.device)).mean(dtype=torch.float64)
