"""The Triton kernels: one module per operation, imported only where they run."""
