"""Commands whose output is text that a person reads."""


def quiet() -> None:
    """Keep transformers' loading bars out of generated text."""
    from transformers.utils import logging

    logging.disable_progress_bar()
