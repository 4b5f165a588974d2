"""A probe: the first layer's calibration in a process of its own, which shows what the machine at hand takes for it.

    python -m kvconvert.planning.probe REQUEST.json

The largest decoder layer is calibrated as `calibrate` does it, on few and on twice as many sequences; the input is the
first layer's. The time of all sequences follows pass by pass: what does not depend on their number, and what grows with
it, up to the number that the pass reads. On a CPU this is read from the processor's clock, which other programs do not
move; how busy they keep the machine is one factor at the end, not a difference of two short times. For a recipe that
searches, the whole model is loaded and one layer's candidates are measured, as the search begins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from kvconvert.auto.search import CLIP_ROWS, search_task
from kvconvert.calibration.activations import LOSS_TOKENS
from kvconvert.convert.input_capture import CalibrationInputs
from kvconvert.convert.layer_calibration import LayerCalibration
from kvconvert.convert.passes import layer_jobs, make_passes
from kvconvert.convert.pipeline import Searches, make_runner
from kvconvert.convert.scores import predicts
from kvconvert.convert.workdir import WorkDir, WorkState
from kvconvert.data.samples import load_samples
from kvconvert.errors import KvconvertError
from kvconvert.io.logs import log_as_text
from kvconvert.io.process import HUGE_PAGES, anonymous_bytes, ended_at_once, return_large_blocks
from kvconvert.io.records import DataInfo, SourceInfo
from kvconvert.models.devices import choose_device
from kvconvert.models.source import open_source
from kvconvert.recipes.recipe import Recipe


@dataclass(frozen=True)
class PartTime:
    """The time of one pass over a layer, or of everything around the passes.

    Attributes:
        name: the name of the pass, or "".
        read: how many sequences it reads in each measurement, and last in the whole calibration.
        seconds: the seconds that each measurement took.
    """

    name: str
    read: tuple[int, ...]
    seconds: tuple[float, ...]

    def whole(self) -> float:
        """Seconds in the whole calibration."""
        *measured, wanted = self.read
        few, many, first, last = measured[0], measured[-1], self.seconds[0], self.seconds[-1]
        if few == many:
            return last * wanted / many
        slope = max(0.0, (last - first) / (many - few))
        return max(0.0, last - slope * many) + slope * wanted


@dataclass(frozen=True)
class LayerProbe:
    """Time and memory of one layer.

    Attributes:
        layer: its number.
        parts: their times.
        startup_seconds: seconds for importing libraries and opening the model.
        begin_seconds: until the first layer's input was there, per token.
        peak_anonymous_bytes: the peak of the process's host memory, None where the system does not tell.
        peak_device_bytes: the peak of the GPU's memory; None on a CPU.
        search_seconds: what the search for the cache's layout will take, or the fits of what predicts scores; None for
            a recipe that needs neither.
    """

    layer: int
    parts: tuple[PartTime, ...]
    startup_seconds: float
    begin_seconds: float
    peak_anonymous_bytes: int | None
    peak_device_bytes: int | None
    search_seconds: float | None = None

    def layer_seconds(self) -> float:
        """Seconds of this layer on all calibration sequences."""
        return sum(part.whole() for part in self.parts)


@dataclass
class _Stopwatch:
    """How long parts of a layer's calibration take: times by their names, one for each measurement.

    Attributes:
        device: where layers are computed. A GPU's work has no clock but the wall's.
        work, wall: seconds of all the process's threads, and of the clock on the wall.
    """

    device: torch.device
    work: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Time what is done within."""
        work, wall = self._now()
        yield
        now = self._now()
        self.work.setdefault(name, []).append(now[0] - work)
        self.wall.setdefault(name, []).append(now[1] - wall)

    def _now(self) -> tuple[float, float]:
        if self.device.type != "cuda":
            return time.process_time(), time.perf_counter()
        torch.cuda.synchronize(self.device)
        return (now := time.perf_counter()), now

    def parts(self, read: dict[str, tuple[int, ...]]) -> tuple[PartTime, ...]:
        """The times of passes, by the sequences that they read, and under "" what the whole layer took beside them."""
        for times in (self.work, self.wall):
            passes = (times[name] for name in read if name)
            times[""] = [max(0.0, whole - sum(parts)) for whole, *parts in zip(times[""], *passes, strict=True)]
        return tuple(PartTime(name, counts, paced(self.work[name], self.wall[name])) for name, counts in read.items())


def paced(work: Sequence[float], wall: Sequence[float]) -> tuple[float, ...]:
    """Times that are to each other as the processor's seconds, and together as long as the wall's."""
    whole = sum(work)
    return tuple(seconds * sum(wall) / whole if whole else 0.0 for seconds in work)


def sequences_probed(samples: int, length: int) -> tuple[int, ...]:
    """Numbers of calibration sequences that the probe runs: enough for all the tokens that searches use."""
    few = max(1, -(-LOSS_TOKENS // length))
    return (samples,) if samples <= 2 * few else (few, 2 * few)


def run_probe(request: dict[str, Any], progress: bool) -> LayerProbe:
    """Run a probe as a process.

    Args:
        request: model, recipe (as `Recipe.to_dict`), data, samples, length, seed, device and layer.
        progress: say what is measured, and let its messages through.

    Raises:
        KvconvertError: the probe failed, with its own sentence.
    """
    with tempfile.TemporaryDirectory(prefix="kvconvert-probe-") as folder:
        file, output = Path(folder) / "request.json", Path(folder) / "probe.json"
        file.write_text(json.dumps(request | {"folder": folder, "output": str(output)}), encoding="utf-8")
        if progress:
            counts = " and ".join(map(str, sequences_probed(request["samples"], request["length"])))
            asked = f"of {request['samples']} calibration sequences"
            print(f"Timing layer {request['layer']} on {counts} {asked}.", file=sys.stderr, flush=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvconvert.planning.probe", str(file)],
            env=HUGE_PAGES | os.environ,
            stdout=(progress and sys.__stderr__) or subprocess.DEVNULL,  # of ours, stdout is for the table
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        peak: int | None = None
        begun = time.perf_counter()
        while True:
            found = anonymous_bytes(process.pid)
            peak = peak if found is None else max(found, peak or 0)
            try:
                _, error = process.communicate(timeout=0.01)
                break
            except subprocess.TimeoutExpired:
                continue
            except BaseException:
                process.kill()
                process.wait()
                raise
        wall = time.perf_counter() - begun
        if process.returncode:
            reason = (error.strip().splitlines() or [f"exit status {process.returncode}"])[-1].removeprefix("Error: ")
            raise KvconvertError(f"The probe of one layer failed: {reason.rstrip('.')}; plan without a probe.")
        if progress and error.strip():
            print(error.strip(), file=sys.stderr)
        measured = json.loads(output.read_text(encoding="utf-8"))
    parts = tuple(
        PartTime(**part | {name: tuple(part[name]) for name in ("read", "seconds")}) for part in measured["parts"]
    )
    found = {"parts": parts, "peak_anonymous_bytes": peak, "startup_seconds": wall - measured["startup_seconds"]}
    return LayerProbe(**measured | found)


def measure(request: dict[str, Any]) -> LayerProbe:
    """Calibrate one layer in this process; see `run_probe`."""
    recipe, device, index = Recipe.from_dict(request["recipe"]), choose_device(request["device"]), request["layer"]
    source = open_source(request["model"])
    runner = make_runner(source, recipe.weights, device)
    jobs = searched = layer_jobs(runner, recipe)
    if recipe.auto is not None:  # its search has chosen how keys are treated before layers are calibrated
        settled = replace(recipe.calibration, calibrate_keys=False)
        jobs = layer_jobs(runner, recipe.model_copy(update={"calibration": settled}))
    counts = sequences_probed(request["samples"], request["length"])
    loaded = max(counts[-1], min(CLIP_ROWS, request["samples"]))
    tokens = load_samples(source, request["data"], loaded, request["length"], request["seed"])
    watch, read, spent, began = _Stopwatch(device), {"": [*counts, request["samples"]]}, 0.0, 0.0
    for count in counts:
        part = tokens.first(count)
        state = _state(request, part.info, runner.num_layers)
        with WorkDir.writing(Path(request["folder"]) / f"work-{count}", state, False) as directory:
            inputs = CalibrationInputs(part.ids, part.extras, part.visual)
            runner.begin(inputs)
            begun = time.perf_counter()
            layers = LayerCalibration(runner, directory, jobs, inputs, watch=lambda made: watch.timing(made.name))
            models = layers.models(index)
            with directory.hidden(index, runner.config.hidden_size, models).writing() as writer:
                for sample in chain.from_iterable(runner.first_input() for _ in range(models)):
                    writer.append(sample)
                writer.commit()
            ready = time.perf_counter()
            with watch.timing(""):
                layers.run(index)
            began = (ready - begun) / part.ids.numel()
            took = time.perf_counter() - begun
            spent += took
        if count != counts[-1]:
            left = took * counts[-1] / count
            print(f"Timed on {count}: {took:.0f} s; about {left:.0f} s left.", flush=True)
    for made in make_passes(jobs[index]):
        read[made.name] = [made.sequences_read(count, request["length"]) for count in (*counts, request["samples"])]
    searching, search_seconds = time.perf_counter(), None
    if recipe.auto is not None or predicts(jobs) or recipe.weights.kept_share:
        state = _state(request, tokens.info, runner.num_layers)
        with WorkDir.writing(Path(request["folder"]) / "search", state, False) as directory:
            searches = Searches(
                runner, directory, tokens, request["data"], request["seed"], say=lambda message: None, progress=False
            )
            search_seconds = searches.kept_seconds(recipe, jobs) if recipe.weights.kept_share else 0.0
            if recipe.auto is not None:
                search_seconds += searches.cache_seconds(recipe, search_task(runner.config, searched, recipe, device))
            elif predicts(jobs):
                search_seconds += searches.scorer_seconds(jobs)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    # What is not measured here is the start: `run_probe` takes it from the whole.
    measured = spent + time.perf_counter() - searching
    parts = watch.parts({name: tuple(counts) for name, counts in read.items()})
    return LayerProbe(index, parts, measured, began, None, peak, search_seconds)


def _state(request: dict[str, Any], data: DataInfo, num_layers: int) -> WorkState:
    """The state of a working directory that is thrown away: without the checksums of the model, which take long."""
    return WorkState(
        versions={},
        recipe=request["recipe"],
        source=SourceInfo(id="probe", config_sha256="0" * 64, weights_sha256={}),
        model=request["model"],
        directory=request["model"],
        data=data,
        seed=request["seed"],
        device=request["device"],
        num_layers=num_layers,
        adapter=None,
        kept_tensors=[],
        kept_modules=[],
        transforms=[],
    )


def main() -> None:
    """Entry point of the process."""
    return_large_blocks()
    log_as_text()
    logging.disable_progress_bar()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        found = measure(request)
    except KvconvertError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    Path(request["output"]).write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    with ended_at_once():
        main()
