"""Which kernels take the time of vLLM's steps, with the models of vllm_serving.py, in one process with the scheduler.

    python benchmarks/vllm_profile.py --only bundle --cases 1x1000,16x12000 --json FILE

Of each `ROWSxTOKENS` case milliseconds of a step that reads prompts and of one that answers, how much of them kernels
take, which ones, and which functions of Python, under a profiler that slows these down.
"""

from __future__ import annotations

import cProfile
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from runner import option_parser, save
from vllm_process import child, reply
from vllm_serving import TINY, engine_options, requests_of, write_model

PROFILED_STEPS, KERNELS = 32, 24


def profiled(arguments: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of steps of an engine in this process, and microseconds and number of each kernel in a step."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import EngineArgs, LLMEngine, SamplingParams

    begin, has_gpu = time.perf_counter(), torch.cuda.is_available()
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments["options"]))
    report: dict[str, Any] = {"start_s": round(time.perf_counter() - begin, 1)}
    sampling = SamplingParams(temperature=0, max_tokens=3 * PROFILED_STEPS, ignore_eos=True, detokenize=False)

    def seconds(is_over: Callable[[list[Any]], bool]) -> tuple[float, int]:
        """Of the steps until something is so after one, given its outputs, and their number."""
        begin, count, over = time.perf_counter(), 0, False
        while not over:
            over = is_over(engine.step())
            count += 1
        if has_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, count

    def answered(rows: int) -> Callable[[list[Any]], bool]:
        told: set[str] = set()

        def is_over(outputs: list[Any]) -> bool:
            told.update(output.request_id for output in outputs)
            return len(told) == rows

        return is_over

    def after(steps: int) -> Callable[[list[Any]], bool]:
        left = iter(range(steps - 1))
        return lambda outputs: next(left, None) is None

    for rows, tokens in arguments["profile"]:
        found: dict[str, Any] = {}
        # The first time compiles, the second is timed, the others told in detail.
        for turn in range(4):
            for number, (prompt, _) in enumerate(requests_of(rows, tokens)):
                engine.add_request(f"{rows}x{tokens}-{turn}-{number}", {"prompt_token_ids": prompt}, sampling)
            for part, is_over in (("prompts", answered(rows)), ("answers", after(PROFILED_STEPS))):
                activities = [ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU]
                profilers = {2: profile(activities=activities), 3: cProfile.Profile()}
                with profilers.get(turn, nullcontext()) as told:
                    took, steps = seconds(is_over)
                if turn == 1:
                    found[part] = {"steps": steps, "step_ms": round(took / steps * 1e3, 3)}
                elif turn == 2:
                    found[part] |= kernels_of(told.key_averages(), steps, has_gpu)
                elif turn == 3:
                    found[part]["functions"] = functions_of(told, steps)
            seconds(lambda outputs: not engine.has_unfinished_requests())
        report[f"{rows}x{tokens}"] = found
    return report


def kernels_of(averages: Any, steps: int, has_gpu: bool) -> dict[str, Any]:
    """What kernels, or a CPU's operators, take in a step, and which take the most."""
    name = "self_device_time_total" if has_gpu else "self_cpu_time_total"
    rows = sorted(((getattr(one, name) / steps, one.count / steps, one.key[:80]) for one in averages), reverse=True)
    listed = [[round(taken, 1), round(count, 1), key] for taken, count, key in rows[:KERNELS] if taken]
    return {"kernels_ms": round(sum(row[0] for row in rows) / 1e3, 3), "kernels": listed}


def functions_of(told: cProfile.Profile, steps: int) -> list[list[Any]]:
    """Microseconds of a step that functions take themselves, and their calls, those that take the most."""
    told.create_stats()
    found = [
        [round(own / steps * 1e6, 1), round(calls / steps, 1), f"{name} {Path(file).name}:{line}"]
        for (file, line, name), (_, calls, own, _, _) in told.stats.items()
    ]
    return sorted(found, reverse=True)[:KERNELS]


def print_profile(name: str, report: dict[str, Any]) -> None:
    """A table of each case."""
    print(name, {key: value for key, value in report.items() if not isinstance(value, dict)}, flush=True)
    for case, parts in report.items():
        for part, told in parts.items() if isinstance(parts, dict) else ():
            print(f"{name} {case} {part}: {told['step_ms']} ms a step, of which kernels {told['kernels_ms']} ms")
            for taken, count, what in told["kernels"] + told["functions"]:
                print(f"{taken:12.1f} us {count:8.1f} x  {what}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        reply(profiled(json.load(sys.stdin)))
        return
    parser = option_parser(__doc__)
    parser.add_argument("--only", default="bundle")
    parser.add_argument("--cases", default="1x1000,16x12000")
    parser.add_argument("--memory", type=float, default=30, help="GiB of cache")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: 8)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    scale, report = 8 if given.tiny else 1, {}
    for name in given.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            shape = (TINY if given.tiny else {}) | {"num_hidden_layers": given.layers}
            options = engine_options(name, given.memory, scale)
            options |= {"load_format": "dummy", "skip_tokenizer_init": True}
            options["model"] = str(write_model(Path(folder), name, shape))
            sizes = [[int(part) for part in case.split("x")] for case in given.cases.split(",")]
            asked = {"profile": [[rows, tokens // scale] for rows, tokens in sizes], "options": options}
            report[name] = child(Path(__file__), asked, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        print_profile(name, report[name])
        save(given.json, report)


if __name__ == "__main__":
    main()
