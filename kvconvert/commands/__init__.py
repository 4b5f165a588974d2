"""The commands, one module each; they import what they need when they run, so that --help answers at once."""


def quiet() -> None:
    """Keep transformers' loading bars out of generated text."""
    from transformers.utils import logging

    logging.disable_progress_bar()
