"""What a layer keeps of AWQ, and whether the error of its output is a good judge of it.

    python benchmarks/weights_choice.py MODEL --text FILE [FILE ...]

Every layer of a dense model is rounded alone, with clips, and with scales and clips. Their errors are measured on
sequences of the calibration text as `kvconvert calibrate` does (behind a norm), relative to the output of all tokens
("sum"), and relative to that of each ("token"). Then the model's KL from its source, with one candidate in all layers
and with each measure's choice; `--alone 1 2` takes the candidates of single layers too, all others unquantized.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from weights_measure import SourceScores, States

from kvconvert.calibration.awq import AwqPass
from kvconvert.calibration.awq_clips import apply_clips
from kvconvert.calibration.awq_scaling import apply_scales
from kvconvert.calibration.protocol import LayerWork
from kvconvert.convert.input_capture import CalibrationInputs
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.data.mixture import load_mixture
from kvconvert.data.text import spaced_samples
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.models.adapters import require_adapter
from kvconvert.models.source import float_dtype, open_source

MEASURES = ("norm", "sum", "token")


class RecordingPass(AwqPass):
    """Keeps what a layer's candidates are, and the sample that decides between them."""

    def _choose(self, work, sample, candidates):
        self.sample, self.candidates = sample, candidates
        return super()._choose(work, sample, candidates)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="reported on")
    parser.add_argument("--samples", type=int, default=32, help="of 512 tokens of the calibration text (default: 32)")
    parser.add_argument("--segments", type=int, default=4, help="of each text (default: 4)")
    parser.add_argument("--length", type=int, default=512, help="scored tokens of a segment (default: 512)")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--alone", type=int, nargs="*", default=[], metavar="LAYER")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--work", type=Path, required=True, help="where candidates and the source's logits are kept")
    return parser.parse_args()


def stored(work: LayerWork, awq: RecordingPass, number: int) -> nn.Module:
    """A copy of the layer with a candidate's weights, dequantized."""
    layer, candidate = copy.deepcopy(work.layer), awq.candidates[number]
    apply_scales(layer, work.structure, candidate.scalings, work.dtype)
    apply_clips(layer, candidate.clips, awq.group_size)
    for name in work.structure.linears:
        weight = layer.get_submodule(name).weight
        weight.copy_(fake_quantize_weight(weight, awq.bits, awq.group_size))
    return layer


def candidates(args: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """By layer, measure and candidate, the error; candidates go to files."""
    tokenizer, source = AutoTokenizer.from_pretrained(args.model), open_source(str(args.model))
    ids = load_mixture(None, tokenizer, args.samples, 512, 0).ids
    runner = LayerRunner(source, require_adapter(source.config), torch.device("cpu"))
    runner.begin(CalibrationInputs(ids))
    states, found = States(torch.cat(list(runner.first_input()))), []
    for index in range(runner.num_layers):
        layer, _ = runner.layer(index)
        work = LayerWork(
            runner.layer_name(index), layer, runner.structure(index), *ids.shape, dtype=float_dtype(source)
        )
        awq = RecordingPass(args.bits, args.group_size)
        with awq.observe(work):
            outputs = [output for *_, output in runner.forward(layer, states, index)]
        awq.solve(work)
        sample = awq.sample
        expected = layer(sample.inputs, **sample.arguments[0])
        errors: dict[str, dict[str, float]] = {measure: {} for measure in MEASURES}
        for number, candidate in enumerate(awq.candidates):
            made = stored(work, awq, number)
            squares = (made(sample.inputs, **sample.arguments[0]) - expected).square().sum(-1)
            sizes = expected.square().sum(-1)
            errors["norm"][candidate.name] = sample.error(made)
            errors["sum"][candidate.name] = float(squares.sum() / sizes.sum())
            errors["token"][candidate.name] = float((squares / sizes).mean())
            torch.save(made.state_dict(), args.work / f"{index}-{candidate.name}.pt")
        found.append(errors)
        said = (f"{name} {' '.join(f'{error:.3g}' for error in of.values())}" for name, of in errors.items())
        print(f"layer {index}: {'; '.join(said)}", flush=True)
        states = States(torch.cat(outputs))
    return found


@torch.no_grad()
def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    errors = candidates(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [spaced_samples(str(text), tokenizer, args.segments, args.length + 1) for text in args.text]
    scores = [SourceScores(args.model, ids, args.work, "cpu") for ids in texts]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    layers, own = model.get_decoder().layers, copy.deepcopy(model.get_decoder().layers.state_dict())

    def report(name: str, chosen: dict[int, str]) -> None:
        layers.load_state_dict(own)
        for index, candidate in chosen.items():
            layers[index].load_state_dict(torch.load(args.work / f"{index}-{candidate}.pt"))
        kl = [score.compare(model)["kl"]["mean"] for score in scores]
        counts = {candidate: list(chosen.values()).count(candidate) for candidate in dict.fromkeys(chosen.values())}
        print(f"{name} {counts}: KL {' '.join(f'{value:.5f}' for value in kl)}", flush=True)

    names = list(errors[0]["norm"])
    for index in args.alone:
        for candidate in names:
            report(f"layer {index} alone", {index: candidate})
    for candidate in names:
        report("all layers", dict.fromkeys(range(len(errors)), candidate))
    for measure in MEASURES:
        report(f"chosen by {measure}", {i: min(of[measure], key=of[measure].get) for i, of in enumerate(errors)})


if __name__ == "__main__":
    sys.exit(main())
