"""Loading a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvconvert.bundle.manifest import MANIFEST_NAME
from kvconvert.errors import BundleError
from kvconvert.runtime.quantizer import BundleQuantizer


def load(
    bundle: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device_map: str | dict[str, Any] | None = None,
    verify: Literal["full", "headers"] = "full",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a bundle's model and tokenizer.

    `model.generate(...)` then uses the bundle's KV plan by itself, and `model.new_kv_cache()` makes a cache for other
    loops.

    Args:
        bundle: a directory, or the id of a repository on the Hub.
        dtype: of everything that is not packed; None takes the one in the bundle's config.json.
        device_map: as in `from_pretrained`.
        verify: "full" hashes every file; "headers" trusts the contents and checks everything else.

    Raises:
        BundleError: there is no bundle, or it does not hold what its manifest says.
    """
    directory = Path(bundle)
    if not directory.exists() and str(bundle).count("/") == 1:
        directory = Path(snapshot_download(str(bundle)))
    if not (directory / MANIFEST_NAME).is_file():
        raise BundleError(
            f"{bundle} is not a kvconvert bundle: it has no {MANIFEST_NAME}; kvconvert export writes one."
        )
    previous = BundleQuantizer.verify
    BundleQuantizer.verify = verify
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype or "auto", device_map=device_map)
    finally:
        BundleQuantizer.verify = previous
    return model, AutoTokenizer.from_pretrained(directory)
