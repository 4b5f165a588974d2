"""The layout of a layer's keys and values by its KV scheme: formats for kernels, and bytes."""
