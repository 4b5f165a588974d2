"""The bundle: one directory with weights, KV plan and manifest."""
