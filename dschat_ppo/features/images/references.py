"""The images of a data row: where they stand in it, and the files that they are. In their place the
text of the row gets a mark for each."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat_ppo.data.content_marks import MOST_MARKS, PLACE, mark_of
from dschat_ppo.data.examples import Row, json_value, kind_of
from dschat_ppo.data.shards import number_of_bytes
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.image_files import ImageFile

COLUMNS = ("image", "images")
_PART_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")
_PART_TYPES = ("image", "image_url", "input_image")
_OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio")
_STORED = "sha256:"  # before the hash of an image in the store
_NAMES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")  # how files end
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
_NO_WEB = "images are not fetched from the web; save them beside the data, and name the files"


@dataclass(frozen=True)
class ImagePlaces:
    """Where the images of a data set stand, and where their files are."""

    column: str | None  # that of the flag; None: `COLUMNS`
    ignored: Sequence[str]  # columns
    folder: str  # of paths
    store: str  # the folder for images that are in the data themselves

    def is_column(self, name: str) -> bool:
        """Whether this column holds images beside the texts."""
        if name in self.ignored:
            return False
        if self.column is not None:
            return name == self.column
        return name in COLUMNS

    def taken_out(self, row: Row) -> tuple[Row, list[Any]]:
        """The row without its images, with marks in their places, and what it says of each image,
        by the numbers of these marks. Images without a place come last. `UserError`: a place
        without an image, or an image without a place where others have one."""
        waiting = [value for name in row if self.is_column(name) for value in _images_in(row[name])]
        walk = _Walk(waiting)
        bare_row = Row()
        for name, value in row.items():
            if self.is_column(name):
                continue
            bare_row[name] = value
            if name not in self.ignored:
                bare_row[name] = walk.marked(value)
        if walk.used and walk.waiting:
            raise UserError(
                f"the row has {len(walk.images) + len(walk.waiting)} images, but its texts have"
                f" places for {len(walk.images)}"
            )
        values = walk.images + walk.waiting
        if len(values) > MOST_MARKS:
            raise UserError(f"the row has {len(values)} images; at most {MOST_MARKS} can be read")
        return bare_row, values

    def kept(self, content: bytes) -> Any:
        """What stands for bytes of a table in its rows: of an image, where it is stored."""
        if not content.startswith(_SIGNATURES):
            return number_of_bytes(content)
        return _STORED + self.stored(content).sha

    def file_of(self, value: Any) -> ImageFile:
        """The file of an image, which a row names or holds. `UserError`: it cannot be read."""
        if isinstance(value, dict):
            return self._file_of_object(value)
        if not isinstance(value, str):
            raise UserError(f"an image is {kind_of(value)}; expected a path")
        if re.fullmatch(rf"{_STORED}[0-9a-f]{{64}}", value):
            return self._file_in_store(value.removeprefix(_STORED))
        if value.startswith("data:"):
            return self.stored(_bytes_of_url(value))
        if value.startswith(("http://", "https://", "ftp://", "s3://", "hf://")):
            raise UserError(f"an image is {value[:80]!r}; {_NO_WEB}")
        path = self._path_in_folder(value.removeprefix("file://"))
        try:
            content = Path(path).read_bytes()
        except OSError as problem:
            raise UserError(
                f"the image {value!r} cannot be read ({problem.strerror}: {path}); --image_folder"
                " names the folder of the paths"
            ) from None
        return ImageFile(path, hashlib.sha256(content).hexdigest())

    def _file_of_object(self, value: dict[str, Any]) -> ImageFile:
        """The file of an image that is an object: its bytes as text, or its path."""
        inner = value.get("bytes", value.get("base64"))
        if isinstance(inner, str) and inner.startswith(_STORED):
            return self.file_of(inner)
        if isinstance(inner, str):
            return self.stored(_bytes_of_base64(inner))
        if isinstance(inner, dict):
            raise UserError(
                f"an image is {kind_of(inner)}, which are no image of a kind that is known (PNG,"
                " JPEG, GIF, WebP, BMP, TIFF)"
            )
        for key in ("image_url", "image", "url", "path"):
            if value.get(key) is not None:
                return self.file_of(value[key])
        raise UserError(f"an image is {kind_of(value)}; expected a path")

    def _path_in_folder(self, value: str) -> str:
        """The whole path of a file, inside of the folder also where links lead."""
        folder = os.path.realpath(self.folder)
        path = os.path.realpath(os.path.join(folder, os.path.expanduser(value)))
        if os.path.commonpath([folder, path]) != folder:
            raise UserError(
                f"the image {value!r} is outside of {folder}; --image_folder names another folder"
            )
        return path

    def _file_in_store(self, sha: str) -> ImageFile:
        """An image that an earlier run has stored, by the hash of its content."""
        path = Path(self.store) / sha[:2] / sha
        if not path.is_file():
            raise UserError(
                f"the image {path} is gone, where the data were read to; give another"
                " --data_output_path, so that they are read again"
            )
        return ImageFile(str(path), sha)

    def stored(self, content: bytes) -> ImageFile:
        """The file of an image that the data hold, by the hash of its content."""
        sha = hashlib.sha256(content).hexdigest()
        path = Path(self.store) / sha[:2] / sha
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(content)
            os.replace(file.name, path)  # other processes store the same
        return ImageFile(str(path), sha)


def unread_columns(places: ImagePlaces, columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Columns of which every value in the first `rows` looks like an image, and which are not read
    as such."""
    unread = []
    for column in columns:
        if places.is_column(column) or column in places.ignored:
            continue
        values = [row[column] for row in rows if row.get(column) is not None]
        if values and all(map(_looks_like_image, values)):
            unread.append(column)
    return unread


def _looks_like_image(value: Any) -> bool:
    """Whether a value is an image, or the path of one, or a list of these."""
    if isinstance(value, list):
        return bool(value) and all(map(_looks_like_image, value))
    if isinstance(value, dict):
        return _looks_like_image(value.get("bytes") or value.get("path"))
    if not isinstance(value, str):
        return False
    if value.startswith((_STORED, "data:image/")):
        return True
    return "\n" not in value and value.lower().endswith(_NAMES)


def _images_in(value: Any) -> list[Any]:
    """The images in a column: one, several, or none."""
    parsed = json_value(value)
    if parsed in (None, "", [], {}):
        return []
    if isinstance(parsed, list):
        return [inner for inner in parsed if inner not in (None, "")]
    return [parsed]


def _bytes_of_url(url: str) -> bytes:
    """The bytes in `data:image/png;base64,...`."""
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise UserError(f"an image is {url[:60]!r}; expected data:image/...;base64,...")
    return _bytes_of_base64(text)


def _bytes_of_base64(text: str) -> bytes:
    """The bytes that a text holds."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UserError(f"an image is {text[:40]!r}, which is not base64") from None


@dataclass
class _Walk:
    """A walk through the texts of a row. `waiting`: images of columns, of which each place without
    an image of its own takes the next."""

    waiting: list[Any]
    images: list[Any] = field(default_factory=list)  # by the numbers of their marks
    used: bool = False  # whether the texts have places

    def __post_init__(self) -> None:
        self.has_column = bool(self.waiting)

    def marked(self, value: Any) -> Any:
        """A value with a mark in place of each image."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, list):
            return [self.marked(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind in _OTHER_MEDIA:
            raise UserError(f"a message has a part of type '{kind}'; images and text can be used")
        if kind in _PART_TYPES:
            reference = {key: value[key] for key in _PART_KEYS if value.get(key) is not None}
            return {"type": "text", "text": self._mark(reference or None)}
        return {key: self.marked(inner) for key, inner in value.items()}

    def _marked_text(self, text: str) -> str:
        """A text, or the JSON of messages, with marks."""
        is_json = '"image' in text and text.lstrip()[:1] in ("[", "{")
        if is_json and isinstance(json_value(text), (list, dict)):
            return json.dumps(self.marked(json_value(text)), ensure_ascii=False)
        if not self.has_column or PLACE not in text:
            return text
        first, *rest = text.split(PLACE)
        return first + "".join(self._mark(None) + piece for piece in rest)

    def _mark(self, image: Any) -> str:
        """The mark of the next image: of the place itself, or else the next of the columns."""
        self.used = True
        if image is None:
            if not self.waiting:
                raise UserError(
                    f"the row has more places for images than images ({len(self.images)})"
                )
            image = self.waiting.pop(0)
        self.images.append(image)
        return mark_of(len(self.images) - 1)
