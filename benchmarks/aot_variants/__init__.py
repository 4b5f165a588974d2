"""The kernels' specialisations for compiling them ahead of time: a module per list, in `variants(capability)`."""
