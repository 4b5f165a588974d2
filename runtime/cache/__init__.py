"""What the cache holds and what is computed with it; nothing here knows transformers."""
