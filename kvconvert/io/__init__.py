"""Below everything else: durable files, checksums, safetensors headers, mapped tensors, and ids on the Hub."""
