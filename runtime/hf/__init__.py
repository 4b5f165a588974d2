"""The integration with transformers."""
