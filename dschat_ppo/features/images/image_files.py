"""Files with images: their content, and the image in it. Worker processes of reward functions
import this module, so it imports no large library."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat_ppo.errors import UserError, reading

if TYPE_CHECKING:
    from PIL.Image import Image

_ON_ITS_SIDE = (5, 6, 7, 8)  # EXIF orientations
LONGEST_SIDES = 200  # of an image: the longer one over the shorter one


@dataclass(frozen=True)
class ImageFile:
    """A file with an image, and the SHA-256 of its content when the data were prepared."""

    path: str
    sha: str

    @property
    def reference(self) -> str:
        """One text, for the column of token rows."""
        return f"{self.sha} {self.path}"

    @staticmethod
    def of(reference: str) -> ImageFile:
        """The file of a `reference`."""
        sha, _, path = reference.partition(" ")
        return ImageFile(path, sha)

    def content(self) -> bytes:
        """The bytes of the file. `UserError`: it cannot be read, or is another one than before."""
        try:
            content = Path(self.path).read_bytes()
        except OSError as problem:
            raise UserError(
                f"{self.path}: the image cannot be read ({problem.strerror}); it was there when the"
                " data were prepared"
            ) from None
        if hashlib.sha256(content).hexdigest() != self.sha:
            raise UserError(
                f"{self.path}: the image has changed since the data were prepared; put the earlier"
                " one back, or prepare the data again with another --data_output_path"
            )
        return content


def decoded_image(content: bytes, most_pixels: int) -> Image:
    """The image in a file as RGB: turned as its EXIF entry says, its first frame, over white where
    it is transparent. `UserError`: it is broken, or larger than `most_pixels`, or too long."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    with reading("the image cannot be decoded"):
        try:
            image: Any = Image.open(io.BytesIO(content))
        except UnidentifiedImageError:
            raise UserError("the image cannot be decoded: Pillow knows no such format") from None
        width, height = image.size
    if width * height > most_pixels:
        raise UserError(
            f"the image has {width} x {height} pixels, more than --image_max_source_pixels"
            f" {most_pixels}"
        )
    if max(width, height) > LONGEST_SIDES * min(width, height):
        raise UserError(
            f"the image has {width} x {height} pixels; its longer side may be {LONGEST_SIDES} times"
            " the shorter one"
        )
    with reading("the image cannot be decoded"):
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")


def described_images(references: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[str]:
    """The size of each image of a prompt, which `spans` has the tokens of; without it where the
    file cannot be read any more."""
    texts = []
    for reference, (start, end) in zip(references, spans, strict=True):
        size = size_in_words(ImageFile.of(reference).path)
        texts.append(f"<image {size}{end - start} tokens>")
    return texts


@lru_cache(maxsize=10_000)
def size_in_words(path: str) -> str:
    """Width and height of the image in a file, "640x480, "; "" if it cannot be read."""
    from PIL import ExifTags, Image

    try:
        with Image.open(path) as image:
            width, height = image.size
            if image.getexif().get(ExifTags.Base.Orientation, 1) in _ON_ITS_SIDE:
                width, height = height, width
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    return f"{width}x{height}, "


def images_of(*references: str) -> list[Image]:
    """The images of a prompt, by the `reference` of each. Their size was checked when the data were
    prepared."""
    return [
        decoded_image(ImageFile.of(reference).content(), sys.maxsize) for reference in references
    ]
