"""What the cache stores and the operations on it; nothing here imports transformers."""
