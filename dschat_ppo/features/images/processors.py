"""A model's own processor of images: its settings, the pixels that it makes, and the tokens that
stand for an image. torchvision is not used, also where it is installed: its pixels differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from dschat_ppo.common.extras import is_installed
from dschat_ppo.errors import UserError, reading

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1024 * 1024  # of an image as Qwen's models see it, unless a flag says otherwise
# settings of configurations that name the ids of placeholders
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_NEED_TORCHVISION = ("lfm2_vl",)
_OF_QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


@dataclass(frozen=True)
class ImageProcessor:
    """The processor of the model in a folder, with the settings of the flags. `flag` names the
    model."""

    config: PretrainedConfig
    flag: str
    folder: str
    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any]  # those that the flags change
    _tokens_of_size: dict[tuple[int, int], list[int]] = field(default_factory=dict, repr=False)
    _joined: dict[tuple[int, int], list[int] | None] = field(default_factory=dict, repr=False)

    @cached_property
    def _of_images(self) -> Any:
        """transformers' processor of images alone."""
        backend = "pil"
        if self.config.model_type in _NEED_TORCHVISION:
            backend = "torchvision"
        with reading(f"{self.flag} {self.folder}: its processor of images cannot be loaded"):
            processor: Any = AutoImageProcessor.from_pretrained(
                self.folder, backend=backend, trust_remote_code=False
            )
        for name in self.options:
            if not hasattr(processor, name):
                known = sorted(processor.valid_kwargs.__annotations__)
                raise UserError(
                    f"--image_options {name}: {type(processor).__name__} has no such setting; it"
                    f" has {', '.join(known)}"
                )
        if self.options:
            with reading("--image_options: the processor of images refuses them"):
                settings = {**processor.to_dict(), **self.options}
                processor = type(processor).from_dict(settings)
        return processor

    @cached_property
    def _of_texts(self) -> Any:
        """transformers' processor of images and text, without its part for video, which needs
        torchvision."""
        kind: Any = PROCESSOR_MAPPING[type(self.config)]

        class WithoutVideo(kind):
            """The processor of the family."""

            def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
                if name == "video_processor":
                    return type(None)
                return super().check_argument_for_proper_class(name, argument)

        known = signature(kind.__init__).parameters
        settings = self._settings
        arguments = {name: value for name, value in settings.items() if name in known}
        if "video_processor" in known:
            arguments["video_processor"] = None
        with reading(f"{self.flag} {self.folder}: its processor cannot be built"):
            # some add tokens to the tokenizer that they get
            return WithoutVideo(
                image_processor=self._of_images, tokenizer=deepcopy(self.tokenizer), **arguments
            )

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings of the processor of images and text in the folder; {} without any."""
        path = Path(self.folder) / "processor_config.json"
        if not path.is_file():
            return {}
        with reading(f"{self.flag} {path}: cannot be used"):
            settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        processors = ("image_processor", "video_processor", "tokenizer", "feature_extractor")
        return {name: value for name, value in settings.items() if name not in processors}

    def refuse_fixed_options(self) -> None:
        """Refuse settings of the flags that the processor of the family overrides in every call."""
        if not self.options:
            return
        fixed = getattr(self._of_texts, "images_kwargs", {})
        for name in self.options.keys() & fixed.keys():
            raise UserError(
                f"--image_options {name}: the processor of {type(self.config).__name__} sets it to"
                f" {fixed[name]} in every call; omit it"
            )

    @property
    def placeholder(self) -> str:
        """The text by which a chat template writes an image."""
        return str(self._of_texts.image_token)

    @cached_property
    def reserved_texts(self) -> tuple[str, ...]:
        """The texts of the tokens that stand for an image, which no other text may hold."""
        token: Any = self.tokenizer.convert_ids_to_tokens(self.image_id)
        return tuple(dict.fromkeys((self.placeholder, str(token))))

    @cached_property
    def placeholder_id(self) -> int:
        """The id of the placeholder, which most families have for the tokens of the image too."""
        token_id: Any = self.tokenizer.convert_tokens_to_ids(self.placeholder)
        return int(token_id)

    @property
    def image_id(self) -> int:
        """The id of the tokens of an image that the tower gives features for."""
        return int(self.config.image_token_id)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The ids of the model that stand for images, video and sound."""
        ids = [getattr(self.config, name, None) for name in _PLACEHOLDERS]
        return tuple(dict.fromkeys(placeholder for placeholder in ids if placeholder is not None))

    @property
    def identity(self) -> str:
        """What the tokens and the pixels of an image depend on."""
        settings = json.dumps(self._of_images.to_dict(), sort_keys=True, default=str)
        return f"{settings} {self._settings}"

    def settings_unlike(self, other: ImageProcessor) -> list[str]:
        """The settings that differ from those of another processor, with both values."""
        mine = {**self._of_images.to_dict(), **self._settings}
        theirs = {**other._of_images.to_dict(), **other._settings}
        differing = []
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                differing.append(f"{name} is {mine.get(name)}, not {theirs.get(name)}")
        return differing

    def tokens(self, image: Image) -> list[int]:
        """The ids that stand for an image, by the processor of the family; they depend on its size
        alone."""
        if image.size not in self._tokens_of_size:
            with reading("the processor of the model refuses the image"):
                encoded = self._of_texts(
                    text=[self.placeholder], images=[[image]], add_special_tokens=False
                )
            self._tokens_of_size[image.size] = list(encoded["input_ids"][0])
        return self._tokens_of_size[image.size]

    def joined(self, left: int, right: int) -> list[int] | None:
        """The ids of two neighbours, one of them of an image, as the tokenizer writes them: of line
        breaks that meet it makes one token. None: they stay as they are."""
        pair = (left, right)
        if pair not in self._joined:
            self._joined[pair] = None
            # each by itself: some tokenizers write a space between two
            text = f"{self.tokenizer.decode([left])}{self.tokenizer.decode([right])}"
            if text and not text.strip("\n"):
                self._joined[pair] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._joined[pair]

    def pixels(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """What the tower takes of the images of one row, in order."""
        # by the processor of the family, which has settings of its own for that of images
        encoded = self._of_texts(
            text=[self.placeholder * len(images)], images=[list(images)], return_tensors="pt"
        )
        pixels = dict[str, Tensor]()
        for name, value in encoded.items():
            if isinstance(value, Tensor) and name not in _OF_TOKENS:
                pixels[name] = value
        return pixels

    def save_settings(self, folder: Path) -> None:
        """Write the processor's files of the model, with the settings of the flags."""
        for pattern in ("*processor*_config.json", "chat_template.json"):
            for file in Path(self.folder).glob(pattern):
                (folder / file.name).write_bytes(file.read_bytes())
        if not self.options:
            return
        for name in ("processor_config.json", "preprocessor_config.json"):
            path = folder / name
            if path.exists():
                settings = json.loads(path.read_text(encoding="utf-8"))
                of_images = settings.get("image_processor", settings)
                if "image_processor" in settings or name == "preprocessor_config.json":
                    of_images.update(self.options)
                    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_processor(
    config: PretrainedConfig,
    flag: str,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
    max_pixels: int | None,
) -> ImageProcessor:
    """The processor of a model, tried on two images.

    Args:
        config: of the model.
        flag: that names the model, for messages.
        folder: of the model, with the files of its processor.
        tokenizer: that of the run.
        options: `--image_options`.
        max_pixels: `--image_max_pixels`.
    """
    if config.model_type in _NEED_TORCHVISION and not is_installed("torchvision"):
        raise UserError(
            f"{flag} {folder}: the processor of images of {type(config).__name__} needs"
            " torchvision, which is not installed; install the one of your torch release"
        )
    if not any(Path(folder).glob("*processor*_config.json")):
        raise UserError(
            f"{flag} {folder}: has no processor of images (preprocessor_config.json); copy it from"
            " the model's page"
        )
    settings = dict(options)
    processor = ImageProcessor(config, flag, folder, tokenizer, settings)
    processor.refuse_fixed_options()
    if config.model_type in _OF_QWEN:
        if "size" not in settings:
            settings["size"] = _size_within(processor, max_pixels)
            processor = ImageProcessor(config, flag, folder, tokenizer, settings)
    elif max_pixels is not None:
        raise UserError(
            f"--image_max_pixels {max_pixels}: {type(config).__name__} divides images into tiles;"
            " give --image_options, such as do_image_splitting=false"
        )
    return processor


def _size_within(processor: ImageProcessor, max_pixels: int | None) -> dict[str, int]:
    """The `size` of Qwen's processors, the least and the most pixels of an image, with another
    most."""
    size = dict(processor._of_images.size)
    of_model = int(size.get("longest_edge") or MOST_PIXELS)
    most = max_pixels or min(of_model, MOST_PIXELS)
    least = min(int(size.get("shortest_edge") or 1), most)
    return {"shortest_edge": least, "longest_edge": most}
