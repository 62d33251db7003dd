"""The images of rows as `data/further_content.py` wants them: found in the raw rows, decoded once,
and expanded to the tokens that the model has for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, List, Value

from dschat_ppo.common.logging import logger
from dschat_ppo.data.content_marks import MARK, has_marks, index_of, mark_of
from dschat_ppo.data.encode import EncodedExample
from dschat_ppo.data.examples import Example, Messages, Row
from dschat_ppo.data.form_sample import quoted_names
from dschat_ppo.errors import UserError, counted
from dschat_ppo.features.images.columns import IMAGES, SPANS
from dschat_ppo.features.images.image_files import ImageFile, decoded_image
from dschat_ppo.features.images.processors import ImageProcessor
from dschat_ppo.features.images.references import ImagePlaces, unread_columns

_AS_CHAT = "--apply_chat_template True makes messages of prompts that are text"
_WITH_IMAGE = (
    "write it otherwise; as the place of an image it is <image>, in a row with a column of images"
    " (--image_column)"
)


@dataclass(frozen=True)
class RowImages:
    """The images of the rows of a data set; `FurtherContent`."""

    processor: ImageProcessor
    places: ImagePlaces
    most_pixels: int  # of an image file
    folder_by_flag: str | None

    @property
    def columns(self) -> dict[str, Any]:
        """References to the files of a row, and where their tokens are."""
        return {IMAGES: List(Value("string")), SPANS: List(List(Value("int32")))}

    @property
    def identity(self) -> str:
        """What token rows depend on."""
        return f"{self.processor.identity} {self.places!r} {self.most_pixels}"

    def kept(self, content: bytes) -> Any:
        """Where the bytes of an image are stored; of other bytes their number."""
        return self.places.kept(content)

    def of_source(
        self, location: str, columns: Sequence[str], first_rows: Sequence[Row]
    ) -> RowImages:
        """With the folder of the data in `location`, unless the flag names one. A data set without
        the column of `--image_column` is read as without the flag, and the log says so, and which
        columns look like images that are not read."""
        folder = self.folder_by_flag
        if folder is None:
            path = Path(location)
            folder = str(path if path.is_dir() else path.parent)
        places = replace(self.places, folder=folder)
        if places.column is not None and places.column not in columns:
            places = replace(places, column=None)
            images = [column for column in columns if places.is_column(column)]
            consequence = "its rows are text, unless their messages hold images"
            if images:
                consequence = f"its images are read from {quoted_names(images)}"
            logger().info(
                f"data: {location}: has no column {self.places.column!r} (--image_column);"
                f" {consequence}"
            )
        for column in unread_columns(places, columns, first_rows):
            logger().warning(
                f"data: {location}: column {column!r} seems to hold images, which are not read;"
                f" --image_column {column} reads them, --ignore_columns {column} says that none"
                " are meant"
            )
        return replace(self, places=places)

    def columns_left(self, columns: Sequence[str]) -> list[str]:
        """Those that hold no images."""
        return [column for column in columns if not self.places.is_column(column)]

    def check_flags_used(self, columns_of_sets: Mapping[str, Sequence[str]]) -> None:
        """Refuse an `--image_column` that no data set has."""
        column = self.places.column
        if column is None or any(column in columns for columns in columns_of_sets.values()):
            return
        columns_by_name = [
            f"{name} has {quoted_names(list(columns))}" for name, columns in columns_of_sets.items()
        ]
        raise UserError(
            f"--image_column {column}: no data set has such a column; {'; '.join(columns_by_name)}"
        )

    def taken_out(self, row: Row) -> tuple[Row, list[Any]]:
        """See `ImagePlaces`."""
        return self.places.taken_out(row)

    def placed(self, example: Example, items: list[Any]) -> tuple[Example, list[ImageFile]]:
        """The example with a mark for each image in its prompt, and their files. Images without a
        place come before the first text of the user."""
        texts = [str(answer) for answer in example.answers]
        if any(map(has_marks, texts)):
            raise UserError("the answer holds an image; a model answers in text")
        prompt = example.prompt
        if isinstance(prompt, str):
            texts.append(prompt)
        else:
            texts += [message["content"] for message in prompt]
        for text in texts:
            self.require_only_text(text, _WITH_IMAGE)
        if not items:
            return example, []
        if isinstance(prompt, str):
            raise UserError(f"images need chat messages, but the prompt is text; {_AS_CHAT}")
        said_by_model = [m["content"] for m in prompt if m["role"] == "assistant"]
        if any(map(has_marks, said_by_model)):
            raise UserError("an answer in the prompt holds an image; a model answers in text")
        marks = [mark for message in prompt for mark in MARK.findall(message["content"])]
        if marks:
            return example, [self.places.file_of(items[index_of(mark)]) for mark in marks]
        files = [self.places.file_of(item) for item in items]
        return replace(example, prompt=_with_images_first(prompt, len(items))), files

    def require_only_text(self, text: str, way_out: str) -> None:
        """Refuse a text that holds what stands for an image, with the `way_out`."""
        for reserved in self.processor.reserved_texts:
            if reserved in text:
                raise UserError(
                    f"a text holds {reserved!r}, which stands for an image to this model; {way_out}"
                )

    def expanded(self, ids: EncodedExample, items: list[ImageFile]) -> EncodedExample:
        """The ids with all tokens of each image in place of its placeholder. `UserError`: the chat
        template writes another number of placeholders, also where thoughts, calls, tools or
        variables hold one, or an image cannot be decoded."""
        placeholder = self.processor.placeholder_id
        reserved = {placeholder, self.processor.image_id}
        in_prompt = sum(map(ids.prompt.count, reserved))
        in_answers = sum(answer.count(token) for answer in ids.answers for token in reserved)
        if in_answers or in_prompt != len(items):
            raise UserError(
                f"the chat template writes {self.processor.placeholder!r}, which stands for an"
                f" image, {in_prompt + in_answers} times for {counted(len(items), 'image')}, with"
                " what it writes of thoughts, calls, tools and variables; where none of these holds"
                " it, give the template of the model (--chat_template)"
            )
        prompt = list[int]()
        spans = list[tuple[int, int]]()
        begins = list[int]()  # of each token of the prompt, and of its end, among the new ones
        waiting = iter(items)
        for token_id in ids.prompt:
            begins.append(len(prompt))
            is_image = token_id == placeholder
            tokens = [token_id]
            if is_image:
                image = decoded_image(next(waiting).content(), self.most_pixels)
                tokens = self.processor.tokens(image)
            follows_image = bool(spans) and spans[-1][1] == len(prompt)
            if prompt and (is_image or follows_image):
                joined = self.processor.joined(prompt[-1], tokens[0])
                if joined is not None:
                    prompt.pop()
                    begins[-1] -= 1
                    tokens = joined + tokens[1:]
            start = len(prompt)
            prompt += tokens
            if is_image:
                spans.append((start, len(prompt)))
        begins.append(len(prompt))
        moved = [(begins[start], begins[end]) for start, end in ids.prompt_spans]
        return replace(ids, prompt=prompt, prompt_spans=moved, fixed_spans=spans)

    def values(self, ids: EncodedExample, items: list[ImageFile]) -> dict[str, Any]:
        """The values of `columns`. `UserError`: a prompt without an answer ends with an image, and
        the first token of the response would follow a part of it."""
        ends_with_image = ids.fixed_spans and ids.fixed_spans[-1][1] == len(ids.prompt)
        if ends_with_image and not ids.answers:
            raise UserError("the prompt ends with an image; let a text follow (--chat_template)")
        references = [item.reference for item in items]
        return {IMAGES: references, SPANS: [list(span) for span in ids.fixed_spans]}

    def facts(self, rows: Dataset) -> list[str]:
        """How many rows have images, and how many tokens these have."""
        # of a selection of rows: `rows.data` has all of the file
        table = rows.select_columns([SPANS, IMAGES]).with_format("arrow")[:]
        spans = table.column(SPANS).combine_chunks()
        bounds = pc.list_flatten(pc.list_flatten(spans)).to_numpy().reshape(-1, 2)
        if not len(bounds):
            return ["no images"]
        sizes = bounds[:, 1] - bounds[:, 0]
        with_images = pc.list_value_length(table.column(IMAGES).combine_chunks())
        count = int((with_images.fill_null(0).to_numpy() > 0).sum())
        return [
            f"{counted(count, 'row')} with images, of {int(np.median(sizes))} tokens in the median"
            f" and {int(sizes.max())} at most"
        ]

    def hashed(self, items: list[ImageFile]) -> list[str]:
        """The content of the images, wherever their files lie."""
        return [item.sha for item in items]


def _with_images_first(prompt: Messages, count: int) -> Messages:
    """The messages with so many images before the first text of the user."""
    marks = "".join(map(mark_of, range(count)))
    messages = list(prompt)
    for index, message in enumerate(messages):
        if message["role"] == "user":
            messages[index] = {**message, "content": marks + message["content"]}
            return messages
    raise UserError("the row has images, but no message of the user in which they can stand")
