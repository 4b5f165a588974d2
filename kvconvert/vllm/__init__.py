"""The low-bit cache inside vLLM: what `vllm serve BUNDLE` needs (docs/vllm.md)."""
