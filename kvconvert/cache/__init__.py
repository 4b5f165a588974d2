"""What a KV scheme makes of a layer's keys and values: formats for kernels, and bytes."""
