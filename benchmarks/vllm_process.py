"""vLLM with random weights in a process of its own, which serves lists of requests one list after another.

`VLLM` is the side of the benchmark, `python benchmarks/vllm_process.py` the process it starts: lines of JSON go in, a
line that begins with REPLY comes back for each. vLLM steps as its offline class does, with its scheduler in a further
process. It samples without FlashInfer. Plugins of vLLM's are kvconvert's, and `register` of this file.
"""

from __future__ import annotations

import cProfile
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from threading import Timer
from typing import Any

REPLY = "REPLY "
# Rows of a profile.
LISTED = 40
VARIABLES = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
PLUGINS = {"kvconvert": "kvconvert.vllm.plugin:register", "kvconvert_benchmark": "vllm_process:register"}


def with_plugins(folder: Path, path: str = "") -> dict[str, str]:
    """An environment in which vLLM, imported from `path` if any, finds the plugins, whatever is installed.

    Args:
        folder: for their description.
        path: as for `VLLM`.
    """
    known = {point.name for point in entry_points(group="vllm.general_plugins")}
    (info := folder / "kvconvert_benchmark-0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvconvert-benchmark\nVersion: 0\n")
    lines = [f"{name} = {value}\n" for name, value in PLUGINS.items() if name not in known]
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "".join(lines))
    paths = [str(folder), str(Path(__file__).parent), path, os.environ.get("PYTHONPATH")]
    return VARIABLES | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def child(script: Path, arguments: dict[str, Any], **variables: str) -> dict[str, Any]:
    """Run `script child` where vLLM is (KVCONVERT_VLLM_PYTHON if set), with these variables: what it gives `reply`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ.get("KVCONVERT_VLLM_PYTHON", sys.executable), str(script), "child"]
        ended = subprocess.run(
            command, input=json.dumps(arguments), env=with_plugins(Path(folder)) | variables, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if line.startswith(REPLY)]
    if not lines:
        # Why a core of vLLM's has ended stands there.
        print(ended.stdout, file=sys.stderr)
    return json.loads(lines[0].removeprefix(REPLY)) if lines else {"failed": ended.returncode}


def reply(report: Any) -> None:
    """Print a child's result as one line among vLLM's own."""
    print(REPLY + json.dumps(report), flush=True)


class VLLM:
    """A running vLLM.

    Args:
        path: the folder vLLM is imported from; empty if this Python imports it.
        model: a directory, or a config of transformers with the model's class in `architectures`.
        options: the keyword arguments of vLLM's `EngineArgs`.
        seconds: after which it is ended whatever it does.

    Attributes:
        version: the version of vLLM.
        blocks, block_tokens: blocks and tokens of a block of its cache.

    Raises:
        SystemExit: when the process ends before it is asked to; its messages are on standard error.
    """

    def __init__(self, path: str, model: Any, options: dict[str, Any], seconds: float | None = None):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            if not isinstance(model, Path):
                model.save_pretrained(folder)
                model = folder
            with tempfile.TemporaryDirectory() as plugins:
                self.process = subprocess.Popen(
                    [sys.executable, __file__], env=with_plugins(Path(plugins), path), stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, text=True, start_new_session=True,
                )  # fmt: skip
                self._timer = Timer(seconds or 1e6, self.kill)
                self._timer.daemon = True
                self._timer.start()
                fixed = {"model": str(model), "load_format": "dummy", "skip_tokenizer_init": True}
                self.version, self.blocks, self.block_tokens = self._ask(fixed | options)
        self.ready_seconds = time.perf_counter() - begin

    def serve(
        self, requests: Sequence[tuple[list[int], int]], arrivals: Sequence[float], sampling: dict[str, Any]
    ) -> tuple[list[list[float]], float]:
        """Seconds after which each token of each request came, and those until all were done.

        Args:
            requests: prompts and numbers of tokens to answer.
            arrivals: seconds after which each comes.
            sampling: the keyword arguments of vLLM's `SamplingParams`.
        """
        told, seconds = self._ask([requests, arrivals, sampling])
        return told, seconds

    def limit(self, blocks: int) -> None:
        """Leave `blocks` of the cache's blocks to the requests."""
        self._ask(["limit_blocks", blocks])

    def profile(self, what: str) -> list[list[Any]]:
        """Begin to watch the "kernels" of its one GPU, or the "functions" of the process that steps; with "", end.

        Returns:
            at the end milliseconds, calls, and name of what took the most.
        """
        return self._ask(["watch", what])

    def close(self) -> None:
        """End the process and wait until it has."""
        self.process.stdin.close()
        self.process.wait()
        self._timer.cancel()

    def kill(self) -> None:
        """End the process and those that it has started, at once."""
        self._timer.cancel()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _ask(self, question: Any) -> Any:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(REPLY):
                return json.loads(line.removeprefix(REPLY))
            print(line, end="", file=sys.stderr)
        sys.exit(f"vLLM ended with status {self.process.wait()}.")


def _serve(engine: Any, requests: list[Any], arrivals: list[float], sampling: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    told: list[list[float]] = [[] for _ in requests]
    added, begin = 0, time.perf_counter()
    while added < len(requests) or engine.has_unfinished_requests():
        while added < len(requests) and arrivals[added] <= time.perf_counter() - begin:
            prompt, answer = requests[added]
            options = {"ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA} | sampling
            engine.add_request(str(added), {"prompt_token_ids": prompt}, SamplingParams(max_tokens=answer, **options))
            added += 1
        if not engine.has_unfinished_requests():
            time.sleep(1e-3)
            continue
        outputs, now = engine.step(), time.perf_counter() - begin
        for output in outputs:
            told[int(output.request_id)] += [now] * len(output.outputs[0].token_ids)
    return told, time.perf_counter() - begin


def register() -> None:
    """Methods of the process with vLLM's scheduler, for `VLLM.limit` and `VLLM.profile`."""
    from vllm.v1.engine.core import EngineCore

    def limit_blocks(core: Any, blocks: int) -> None:
        pool = core.scheduler.kv_cache_manager.block_pool
        pool.free_blocks(getattr(core, "held_blocks", []))
        core.held_blocks = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - blocks))

    def watch(core: Any, what: str) -> list[list[Any]]:
        before, core.watching = getattr(core, "watching", None), None
        told = _told(before) if before is not None else []
        if what:
            core.watching = cProfile.Profile() if what == "functions" else _kernel_profile()
            (core.watching.enable if what == "functions" else core.watching.start)()
        return told

    EngineCore.limit_blocks, EngineCore.watch = limit_blocks, watch


def _kernel_profile() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])


def _told(watching: Any) -> list[list[Any]]:
    """Milliseconds, calls and names of what took the most while it was watched."""
    found: dict[str, list[float]] = {}
    if isinstance(watching, cProfile.Profile):
        watching.disable()
        watching.create_stats()
        for (file, line, name), (_, calls, own, _, _) in watching.stats.items():
            found[f"{name} {Path(file).name}:{line}"] = [own * 1e3, calls]
    else:
        from torch.autograd import DeviceType

        watching.stop()
        # As `key_averages` counts, which takes minutes for hundreds of thousands of launches.
        events = watching.profiler.kineto_results.events()
        own = DeviceType.CUDA if any(event.device_type() == DeviceType.CUDA for event in events) else DeviceType.CPU
        for event in events:
            if event.device_type() == own:
                total = found.setdefault(event.name(), [0.0, 0])
                total[0] += event.duration_ns() / 1e6
                total[1] += 1
    rows = sorted(([round(took, 3), calls, name[:100]] for name, (took, calls) in found.items()), reverse=True)
    return [[round(sum(row[0] for row in rows), 3), sum(row[1] for row in rows), "all"], *rows[:LISTED]]


def main() -> None:
    options = json.loads(sys.stdin.readline())
    import vllm

    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**options))
    cache = engine.vllm_config.cache_config
    answer: Any = vllm.__version__, cache.num_gpu_blocks, cache.block_size
    while True:
        reply(answer)
        line = sys.stdin.readline()
        if not line:
            return
        asked = json.loads(line)
        answer = engine.engine_core.call_utility(*asked) if isinstance(asked[0], str) else _serve(engine, *asked)


if __name__ == "__main__":
    main()
