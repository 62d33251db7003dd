"""Chats with models that see pictures, which `/image` puts before the next message."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from dschat_ppo.common import dist
from dschat_ppo.config.feature_flags import HasFeatures, observing_flags
from dschat_ppo.data.content_marks import MARK, MOST_MARKS, index_of, mark_of
from dschat_ppo.data.encode import encode_example
from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import Messages
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.flags import ImageFlags
from dschat_ppo.features.images.given_embeddings import store_of
from dschat_ppo.features.images.image_files import ImageFile, decoded_image
from dschat_ppo.features.images.step_data import (
    processor_of,
    refuse_flags_of_images,
    require_extras,
    require_place_for_images,
)
from dschat_ppo.features.images.tower import trains_with_images
from dschat_ppo.models.loading import load_config
from dschat_ppo.tools.chat_model import (
    ChatCommand,
    ChatModel,
    CheckedModel,
    StreamedToken,
    changes_of_tool,
)
from dschat_ppo.tools.sampling_settings import SamplingSettings
from dschat_ppo.tools.token_stream import GivenPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from dschat_ppo.features.images.inputs import ImageInputs

# role of a message whose text stands for a picture -> the way out
_WAYS_OUT = {
    "user": "write it otherwise; /image PATH puts a picture before the message",
    "system": "write the system message otherwise (/system)",
    "assistant": "the model wrote it in its answer, which /undo forgets",
}
_USAGE = "/image PATH        put a picture before the next message; several are possible"


def loader_of(
    features: HasFeatures, checked: Sequence[CheckedModel], at_end: ExitStack
) -> Callable[[CheckedModel, str], ChatModel] | None:
    """What loads the models of a chat, if one of them sees pictures; None if none does. `at_end`
    deletes the copies of the pictures."""
    seeing = []
    for model in checked:
        model_config = load_config(model.folder, model.flag)
        if trains_with_images(features, model_config):
            require_extras(model_config, f"{model.flag} {model.name}")
            seeing.append(model)
    if not seeing:
        model_config = load_config(checked[0].folder, checked[0].flag)
        refuse_flags_of_images(features, model_config, f"{checked[0].flag} {checked[0].name}")
        return None
    used = observing_flags(features)
    if used:
        raise UserError(
            f"{seeing[0].flag} {seeing[0].name}: sees pictures, which do not go with"
            f" {' and '.join(used)} in a chat yet; omit {' and '.join(used)}, or chat with a model"
            " of text"
        )
    folder = at_end.enter_context(TemporaryDirectory())
    pictures = ChatPictures(folder, features.of(ImageFlags).image_max_source_pixels)

    def load(model: CheckedModel, dtype: str) -> ChatModel:
        if model in seeing:
            return PictureModel(model, dtype, features, pictures)
        return ChatModel(model, dtype)

    return load


def commands_of(models: Sequence[ChatModel]) -> list[ChatCommand]:
    """The command that adds a picture, if a model sees pictures."""
    if not any(isinstance(model, PictureModel) for model in models):
        return []
    return [ChatCommand("image", _USAGE, partial(_add_picture, models))]


def _add_picture(models: Sequence[ChatModel], argument: str) -> tuple[str, str]:
    """The mark of the picture in the file `argument`, and what the person is told of it."""
    if not argument:
        raise UserError("/image needs the path of a file, such as: /image picture.png")
    seeing = [_that_takes_pictures(model) for model in models]
    pictures = seeing[0].pictures
    file, image = pictures.read(argument)
    tokens = dict.fromkeys(str(model.tokens_of(image)) for model in seeing)
    width, height = image.size
    note = f"before the next message: <image {width}x{height}, {' and '.join(tokens)} tokens>"
    return pictures.add(file), note


def _that_takes_pictures(model: ChatModel) -> PictureModel:
    """The model, if its messages may have pictures."""
    if not isinstance(model, PictureModel):
        raise UserError(f"{model.name} sees no pictures, so none can be added to this chat")
    if not model.has_template:
        raise UserError(
            f"{model.name}: pictures need the chat template; omit --apply_chat_template False"
        )
    return model


class ChatPictures:
    """The pictures of a chat, by the numbers of their marks. They are copied into a folder, so that
    a conversation keeps them when their files change."""

    def __init__(self, folder: str, most_pixels: int):
        self._folder = Path(folder)
        self.most_pixels = most_pixels
        self.files = list[ImageFile]()

    def read(self, argument: str) -> tuple[ImageFile, Image]:
        """The picture in a file that a person names. `UserError`: it cannot be used."""
        from dschat_ppo.features.images.references import ImagePlaces

        if len(self.files) == MOST_MARKS:
            raise UserError(f"this chat has {MOST_MARKS} pictures, the most; begin another one")
        path = argument.strip("\"'")  # as terminals paste it
        if path.startswith(("http://", "https://")):
            raise UserError(
                f"{path}: pictures are not fetched from the web; save it, and name the file"
            )
        try:
            content = Path(os.path.expanduser(path)).read_bytes()
        except OSError as problem:
            raise UserError(
                f"{path}: cannot be read ({problem.strerror}); name the file of a picture"
            ) from None
        try:
            image = decoded_image(content, self.most_pixels)
        except UserError as problem:
            raise UserError(
                f"{path}: {problem}; name a picture, such as a PNG or JPEG file"
            ) from None
        folder = str(self._folder)
        return ImagePlaces(None, (), folder, folder).stored(content), image

    def add(self, file: ImageFile) -> str:
        """Keep a picture; returns its mark."""
        self.files.append(file)
        return mark_of(len(self.files) - 1)


class PictureModel(ChatModel):
    """A chat model whose messages may have pictures."""

    def __init__(
        self, checked: CheckedModel, dtype: str, features: HasFeatures, pictures: ChatPictures
    ):
        from dschat_ppo.features.images.content import RowImages
        from dschat_ppo.features.images.references import ImagePlaces

        self.pictures = pictures
        model_config = load_config(checked.folder, checked.flag)
        processor = processor_of(
            features, model_config, checked.folder, checked.tokenizer, checked.flag
        )
        places = ImagePlaces(None, (), ".", ".")  # rows are not read
        self._content = RowImages(processor, places, pictures.most_pixels, None)
        store = store_of(features, checked.folder, dtype, checked.tokenizer, dist.device())
        assert store is not None  # the model sees pictures
        self._store = store
        super().__init__(checked, dtype, changes_of_tool(features), store)
        if self.has_template:
            require_place_for_images(checked.tokenizer, processor.placeholder)

    def tokens_of(self, image: Image) -> int:
        """How many tokens a picture is to this model."""
        return len(self._content.processor.tokens(image))

    def respond(
        self, messages: Messages, settings: SamplingSettings, response_index: int
    ) -> Iterator[StreamedToken]:
        """As `ChatModel.respond`, with the pictures whose marks the messages have."""
        ids, given_prompt = self._prompt(messages)
        yield from self.draw_tokens(
            ids, settings, settings.max_tokens, response_index, given_prompt=given_prompt
        )

    def _prompt(self, messages: Messages) -> tuple[list[int], GivenPrompt]:
        """The tokens of a conversation, and what the model gets for its pictures. `UserError`: a
        text stands for a picture."""
        for message in messages:
            self._content.require_only_text(message["content"], _WAYS_OUT[message["role"]])
        if not self.has_template:
            ids = self.prompt_ids(messages)
            return ids, GivenPrompt(lambda indices, width: None, self._store.banned_ids)
        files = list[ImageFile]()
        for message in messages:
            for mark in MARK.findall(message["content"]):
                if message["role"] == "assistant" or index_of(mark) >= len(self.pictures.files):
                    raise UserError(
                        "a message has a character that stands for a picture here; /undo forgets it"
                    )
                files.append(self.pictures.files[index_of(mark)])
        encoded = encode_example(self.tokenizer, Example(messages, []))
        encoded = self._content.expanded(encoded, files)
        record = self._content.values(encoded, files)
        pictures = partial(self._given, encoded.prompt, record)
        return encoded.prompt, GivenPrompt(pictures, self._store.banned_ids)

    def _given(
        self, ids: list[int], record: dict[str, Any], indices: Sequence[int], width: int
    ) -> ImageInputs | None:
        """The pictures of a prompt of these `ids`, in its first `width` columns."""
        input_ids = torch.tensor([ids] * len(indices))
        inputs = self._store.for_rows([record] * len(indices), input_ids)
        if inputs is None:
            return None
        return inputs.of_rows(torch.arange(len(indices)), width)
