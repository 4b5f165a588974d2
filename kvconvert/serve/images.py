"""Images in conversations: from data URLs to pixels, with limits that hold before anything is decoded."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvconvert.data.images import MOST_SCANS, read_image, too_many_scans
from kvconvert.errors import DataError, first_line
from kvconvert.serve.refusal import Refusal

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
# Processors give the shorter side a size of their own: what is much longer would become larger than any picture.
LONGEST_SIDES = 50


def read_images(urls: Sequence[str], most_pixels: int, param: str) -> list[Image]:
    """Images in RGB from data URLs.

    Args:
        urls: with base64 of PNG, JPEG, or WebP.
        most_pixels: of all of them together, by what their headers say.
        param: the field of the request, for refusals.

    Raises:
        Refusal: one is no such image, is much longer than wide, or they are too large.
    """
    opened = [_open(url, place, param) for place, url in enumerate(urls, 1)]
    for place, image in enumerate(opened, 1):
        if max(image.size) > LONGEST_SIDES * min(image.size):
            said = f"one side is more than {LONGEST_SIDES} times the other; crop it"
            raise _refused(f"Image {place} has {image.width:,} x {image.height:,} pixels, of which {said}.", param)
    if (pixels := sum(image.width * image.height for image in opened)) > most_pixels:
        message = f"The images have {pixels:,} pixels; this server takes at most {most_pixels:,} in a conversation."
        raise _refused(message, param)
    try:
        return [read_image(image, None, f"image {place}") for place, image in enumerate(opened, 1)]
    except DataError as error:
        raise _refused(f"{str(error)[:1].upper()}{str(error)[1:]}", param) from error


def _open(url: str, place: int, param: str) -> Image:
    """An image of which the header alone was read."""
    from PIL import Image as pillow

    try:
        content = base64.b64decode(url.partition(",")[2], validate=True)
        image = pillow.open(io.BytesIO(content), formats=FORMATS)
    except pillow.DecompressionBombError as error:
        raise _refused(f"Image {place} has too many pixels; send a smaller one.", param) from error
    except (OSError, ValueError, SyntaxError) as error:
        said = "it is no PNG, JPEG, or WebP" if isinstance(error, OSError) else first_line(error)
        raise _refused(f"Image {place} cannot be read ({said}); send another one.", param) from error

    if too_many_scans(image):
        raise _refused(f"Image {place} comes in more than {MOST_SCANS} scans; store it as a baseline JPEG.", param)
    return image


def _refused(message: str, param: str) -> Refusal:
    return Refusal(400, message, param=param, code="invalid_image")
