"""Files with images: their content, and the image in it. Worker processes of reward functions
import this module, so it imports no large library."""

from __future__ import annotations

import hashlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat_ppo.errors import UserError, reading

if TYPE_CHECKING:
    from PIL.Image import Image

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
    from PIL import Image, ImageOps

    with reading("the image cannot be decoded"):
        image: Any = Image.open(io.BytesIO(content))
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


def images_of(*references: str) -> list[Image]:
    """The images of a prompt, by the `reference` of each. Their size was checked when the data were
    prepared."""
    return [
        decoded_image(ImageFile.of(reference).content(), sys.maxsize) for reference in references
    ]
