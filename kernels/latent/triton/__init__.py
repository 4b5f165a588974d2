"""The Triton kernel."""
