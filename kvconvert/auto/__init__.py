"""The search behind the recipe `auto`: which bits each layer's cache gets, for a given size of the whole."""
