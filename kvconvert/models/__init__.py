"""Facts about models: checkpoints, names of tensors and modules, layer types, processors.

Importing this package refuses a transformers that is too old or too new, before anything is imported from it.
"""

import re
from contextlib import suppress
from importlib import metadata

from kvconvert.errors import UsageError

# The oldest version that is supported, and the first that is not; as in pyproject.toml.
OLDEST, TOO_NEW = (5, 23), (6, 0)


def _check_transformers() -> None:
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version("transformers")
        if not OLDEST <= tuple(map(int, re.findall(r"\d+", version)[:2])) < TOO_NEW:
            needed = f"transformers>={'.'.join(map(str, OLDEST))},<{TOO_NEW[0]}"
            raise UsageError(f"transformers is {version}, and kvconvert needs another; run pip install '{needed}'.")


_check_transformers()
