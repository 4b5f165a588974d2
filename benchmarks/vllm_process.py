"""vLLM with random weights in a process of its own, which serves lists of requests one list after another.

`VLLM` is the side of the benchmark, `python benchmarks/vllm_process.py` the process it starts: lines of JSON go in, a
line that begins with REPLY comes back for each. vLLM steps as its offline class does, with its scheduler in a further
process. It samples without FlashInfer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

REPLY = "REPLY "
VARIABLES = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


class VLLM:
    """A running vLLM.

    Args:
        path: the folder vLLM is imported from; empty if this Python imports it.
        config: of transformers, with the model's class in `architectures`.
        options: of vLLM's `EngineArgs`.

    Raises:
        SystemExit: when the process ends before it is asked to; its messages are on standard error.
    """

    def __init__(self, path: str, config: Any, options: dict[str, Any]):
        begin, environment = time.perf_counter(), os.environ | VARIABLES
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH")]))
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            command = [sys.executable, __file__]
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.version = self._ask({"model": folder, "load_format": "dummy", "skip_tokenizer_init": True} | options)
        self.ready_seconds = time.perf_counter() - begin

    def serve(
        self, requests: Sequence[tuple[list[int], int]], arrivals: Sequence[float], sampling: dict[str, Any]
    ) -> tuple[list[list[float]], float]:
        """Seconds after which each token of each request came, and those until all were done.

        Args:
            requests: prompts and numbers of tokens to answer.
            arrivals: seconds after which each comes.
            sampling: of vLLM's `SamplingParams`.
        """
        told, seconds = self._ask([requests, arrivals, sampling])
        return told, seconds

    def close(self) -> None:
        """End the process and wait until it has."""
        self.process.stdin.close()
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
        for output in engine.step():
            now = time.perf_counter() - begin
            told[int(output.request_id)] += [now] * len(output.outputs[0].token_ids)
    return told, time.perf_counter() - begin


def main() -> None:
    options = json.loads(sys.stdin.readline())
    import vllm

    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**options))
    reply = vllm.__version__
    while True:
        print(REPLY + json.dumps(reply), flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        reply = _serve(engine, *json.loads(line))


if __name__ == "__main__":
    main()
