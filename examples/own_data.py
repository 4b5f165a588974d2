"""Calibrate on data of your own, and measure on other data of the same kind.

    python examples/own_data.py MODEL OUTPUT CALIBRATION HELD_OUT

Both are .txt or .jsonl files, or others that docs/quickstart.md lists. Rows with `messages` go through the chat
template. Never measure on what was calibrated on: the figures would be too good.
"""

import argparse
import sys
from pathlib import Path

import kvconvert


def main(model: str, output: str, calibration: str, held_out: str, samples: int = 64, tokens: int = 8192) -> float:
    """Convert the cache alone, and return the mean KL divergence on the held-out data."""
    work, bundle = Path(output) / "work", Path(output) / "bundle"
    kvconvert.calibrate(model, work, recipe="kv-only", data=calibration, samples=samples, seq_len=256)
    kvconvert.export(work, bundle, force=True)
    print(f"The bundle is in {bundle}.")
    report = kvconvert.evaluate(bundle, model, data=held_out, tokens=tokens, only=["perplexity", "kl"])
    print(f"perplexity {report.perplexity.source:.2f} -> {report.perplexity.bundle:.2f}, KL {report.kl.mean:.4f}")
    return report.kl.mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a model, or its id on the Hub")
    parser.add_argument("output", help="directory to write the bundle and its working directory to")
    parser.add_argument("calibration", help="file of data to calibrate on")
    parser.add_argument("held_out", help="file of other data, to measure on")
    try:
        main(**vars(parser.parse_args()))
    except (kvconvert.KvconvertError, OSError) as error:  # one sentence, without a traceback
        sys.exit(str(error))
