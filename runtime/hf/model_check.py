"""`kvconvert verify`: the model that a bundle describes, built without weights and compared with its tensors."""

from __future__ import annotations

import torch

from kvconvert.bundle.reader import Bundle
from kvconvert.models.configuration import model_class
from kvconvert.runtime.hf.fit import compare_shapes, no_model, read_config
from kvconvert.runtime.hf.quantizer import place_packed_linears


def check_fits(bundle: Bundle) -> int:
    """Build the bundle's model without weights and compare every module with its tensors.

    Returns:
        how many tensors were compared.

    Raises:
        BundleError: config.json makes no model, or one that other tensors belong to.
    """
    config = read_config(bundle)
    del config.quantization_config
    try:
        with torch.device("meta"):
            model = model_class(config).from_config(config)
    except Exception as error:  # models are built by code of many authors
        raise no_model(error) from error
    compared = compare_shapes(bundle, model)
    place_packed_linears(model, bundle)  # refuses what the manifest calls quantized and the model does not have
    return compared
