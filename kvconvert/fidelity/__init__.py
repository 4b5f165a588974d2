"""How much of a model's behavior its bundle keeps, measured through the quantized cache."""
