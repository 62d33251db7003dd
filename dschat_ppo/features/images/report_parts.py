"""The part of a report that shows the pictures of prompts: small ones, inside of the page."""

from __future__ import annotations

import base64
import html
import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from dschat_ppo.common.extras import is_installed
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.columns import IMAGES
from dschat_ppo.features.images.image_files import ImageFile, decoded_image

MOST_PICTURES = 40  # of a page, that differ
_SIDE = 96  # pixels of the longer one
_QUALITY = 80  # of JPEG


def content_parts_of(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """HTML with the pictures of each prompt, small; the file names of those that are gone, or are
    other ones than in the run. "" without Pillow, and where the page has enough pictures."""
    if not is_installed("PIL"):
        return [""] * len(contents)
    on_page = set[ImageFile]()
    html_of_contents = []
    for content in contents:
        pictures = ""
        for file in _image_files(content):
            if file in on_page or len(on_page) < MOST_PICTURES:
                on_page.add(file)
                pictures += _picture(file)
        if pictures:
            pictures = f"<p>{pictures}</p>"
        html_of_contents.append(pictures)
    return html_of_contents


def _image_files(content: Mapping[str, Any]) -> list[ImageFile]:
    """The files that a line of samples names; [] of a damaged one."""
    with suppress(LookupError, TypeError):
        return [ImageFile(entry["path"], entry["sha256"]) for entry in content[IMAGES]]
    return []


def _picture(file: ImageFile) -> str:
    """HTML of a picture, or its file name."""
    name = html.escape(Path(file.path).name)
    jpeg = _small_jpeg(file)
    if jpeg is None:
        return f'<span class="quiet">{name} is no longer there </span>'
    text = base64.b64encode(jpeg).decode()
    return f'<img src="data:image/jpeg;base64,{text}" alt="{name}" title="{name}"> '


@lru_cache(maxsize=4 * MOST_PICTURES)  # a page that follows a run is made again and again
def _small_jpeg(file: ImageFile) -> bytes | None:
    """The picture in a file, of 96 pixels at most, as JPEG; None if it cannot be read, or has
    changed since the run."""
    if not Path(file.path).is_file():
        return None
    try:
        image = decoded_image(file.content(), sys.maxsize)
    except UserError:
        return None
    image.thumbnail((_SIDE, _SIDE))
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=_QUALITY)
    return jpeg.getvalue()
