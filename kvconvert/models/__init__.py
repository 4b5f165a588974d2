"""Facts about models: checkpoints, names of tensors and modules, layer types, processors."""
