"""`vllm bench serve` against servers in bf16, with AWQ weights and an fp8 cache, and with a bundle, one after another.

    python benchmarks/vllm_bench_serve.py --only bf16,awq-fp8,bundle --input 2048 --output 256 --json FILE

Models and options are those of vllm_serving.py: random weights of an 8B Llama's shape and --memory GiB of cache. For
each of --concurrency the client sends --prompts prompts of random tokens, the lengths within a half of --input and
--output, as fast as that many requests at a time allow; the first of these loads comes once before, unmeasured. With
--tiny a small model serves short prompts on a CPU, which does everything and measures nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from runner import option_parser, save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from vllm_process import with_plugins
from vllm_serving import LLAMA_8B, TINY, engine_options, write_model

FIGURES = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
VLLM = (os.environ.get("KVCONVERT_VLLM_PYTHON", sys.executable), "-m", "vllm.entrypoints.cli.main")


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer for which every token is a word."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def flags(options: dict[str, Any]) -> list[str]:
    """Arguments of `vllm serve` for fields of `EngineArgs`."""
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until_ready(server: subprocess.Popen, address: str) -> None:
    """Wait until the server answers; SystemExit if it ends before."""
    while server.poll() is None:
        try:
            urlopen(f"{address}/health", timeout=1).close()
        except (URLError, OSError):
            time.sleep(0.5)
        else:
            return
    sys.exit(f"vLLM ended with status {server.returncode}.")


def load(
    model: Path, address: str, environment: dict[str, str], prompts: int, concurrency: int, lengths: tuple[int, int]
) -> Any:
    """The client's report of one load; SystemExit if a request fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *VLLM, "bench", "serve", "--base-url", address, "--model", str(model), "--dataset-name", "random",
            "--random-input-len", str(lengths[0]), "--random-output-len", str(lengths[1]),
            "--random-range-ratio", "0.5", "--num-prompts", str(prompts), "--max-concurrency", str(concurrency),
            "--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "report",
        ]  # fmt: skip
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        report = json.loads((Path(folder) / "report").read_text())
    if report["completed"] < prompts:
        sys.exit(f"{prompts - report['completed']} of {prompts} requests failed.")
    return report


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--only", default="bf16,awq-fp8,bundle")
    parser.add_argument("--input", type=int, default=2048)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--concurrency", default="8,64")
    parser.add_argument("--memory", type=float, default=30, help="GiB of cache for each")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    # So that what was started ends with this command.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    report: dict[str, Any] = {}
    lengths = chosen.input, chosen.output
    for name in chosen.only.split(","):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as plugins:
            shape = TINY if chosen.tiny else {}
            write_tokenizer(Path(folder), (LLAMA_8B | shape)["vocab_size"])
            model = write_model(Path(folder), name, shape)
            environment = with_plugins(Path(plugins))
            options = engine_options(name, chosen.memory, 8 if chosen.tiny else 1) | {"load_format": "dummy"}
            begin, port = time.perf_counter(), free_port()
            address = f"http://127.0.0.1:{port}"
            server = subprocess.Popen(
                [*VLLM, "serve", str(model), "--port", str(port), *flags(options)], env=environment,
                stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                wait_until_ready(server, address)
                report[name] = {"ready_seconds": round(time.perf_counter() - begin, 1)}
                counts = [int(count) for count in chosen.concurrency.split(",")]
                load(model, address, environment, counts[0] * 2, counts[0], lengths)
                for count in counts:
                    told = load(model, address, environment, chosen.prompts, count, lengths)
                    report[name][count] = {figure: round(told[figure], 2) for figure in FIGURES}
                    print(name, count, json.dumps(report[name][count]), flush=True)
                    save(chosen.json, report)
            finally:
                if server.poll() is None:
                    os.killpg(server.pid, signal.SIGTERM)
                    server.wait()


if __name__ == "__main__":
    main()
