"""Try every model type of transformers and record in sweep.json what came of each, which docs/models.md shows.

python tests/test_models/record_sweep.py [TYPE ...]    all types (an hour), or these; then `make docs`
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("sweep.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    sys.path.append(str(ROOT / "tests"))
    import transformers
    from sweep import outcome
    from tiny.every_type import WITHOUT, names

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = json.loads(RESULTS.read_text(encoding="utf8")) if RESULTS.exists() else {}
    for name in parser.parse_args().types or [name for name in names() if name not in WITHOUT]:
        with tempfile.TemporaryDirectory() as directory:
            results[name] = outcome(name, Path(directory))
        print(name, results[name], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
