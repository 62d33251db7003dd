"""The images of a prompt as rewards see it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from dschat_ppo.data.prompt_contents import PromptContent
from dschat_ppo.features.images.columns import IMAGES, SPANS
from dschat_ppo.features.images.image_files import ImageFile, described_images
from dschat_ppo.rewards.call_forms import MadeByWorker

_OPENS = "dschat_ppo.features.images.image_files"  # what a worker imports


def content_of(record: Mapping[str, Any]) -> PromptContent | None:
    """Of a token row, with its images for functions that name `images`, as a list; None for data of
    a model that sees none."""
    if IMAGES not in record:
        return None
    spans = [(start, end) for start, end in record[SPANS] or ()]
    references = tuple(record[IMAGES] or ())
    images = MadeByWorker(_OPENS, "images_of", references)
    files = [ImageFile.of(reference) for reference in references]
    message_parts = [{"type": "image", "path": file.path} for file in files]
    described = partial(described_images, references, spans)
    written = {}
    if files:
        written[IMAGES] = [{"path": file.path, "sha256": file.sha} for file in files]
    return PromptContent(spans, {IMAGES: images}, message_parts, described, written)
