"""The images of token rows as the model gets them: pixels are made when a row is needed, and what
the tower makes of them is kept as long as there is room; the pixels, where the tower trains."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.errors import UserError
from dschat_ppo.features.images.columns import IMAGES, ROW_OF_IMAGES, SPANS
from dschat_ppo.features.images.image_files import ImageFile, decoded_image
from dschat_ppo.features.images.inputs import ImageInputs
from dschat_ppo.features.images.processors import ImageProcessor
from dschat_ppo.features.images.tower import ImageFeatures, ImageTower, joined_features
from dschat_ppo.features.images.trained_tower import ImagePixels, TowerInModel, joined_pixels
from dschat_ppo.models.given_embeddings import GivenPrompts, GivenUsage
from dschat_ppo.types import PromptBatch, Rollout, full_sequences, row_sequences

_PROBE_COLUMNS = (1, 2, 3, 4, 9, 10, 11, 12)  # of a probe, that stand for two images
_PROBE_STARTS = (1, 8)  # columns of prompts of a probe at which an image of 2 x 2 tokens begins
_PROBE_TOKENS = 4
_IDLE_SIDE = 32  # of an image that stands nowhere


@dataclass(frozen=True)
class ServedImages:
    """What the model gets of the images of one row, in host memory."""

    features: ImageFeatures | ImagePixels
    grid: Mapping[str, Tensor]  # what positions depend on


class ImageStore:
    """Serves the images of rows; `GivenSource`. One call of a frozen tower takes all images of a
    row and no others, so that the bits depend neither on the batch nor on the rank. With a
    `TowerInModel`, pixels are served, which the model encodes; rows without images then get one
    small image that stands nowhere, so that all passes of all ranks run the tower. Threads may
    share it."""

    name = "images"
    columns: tuple[str, ...] = (IMAGES,)

    def __init__(
        self,
        processor: ImageProcessor,
        tower: ImageTower | TowerInModel,
        most_pixels: int,
        most_bytes: int,
    ):
        self._processor = processor
        self._tower = tower
        self._most_pixels = most_pixels  # of an image file
        self._most_bytes = most_bytes  # of what is kept
        self._kept: OrderedDict[tuple[str, ...], ServedImages] = OrderedDict()  # oldest use first
        self._kept_bytes = 0
        self._lock = Lock()
        self._prompts = list[Dataset]()  # data sets of prompts, in the order of their numbers
        self._store_of_pixels: ImageStore | None = None  # keeps those that this one runs
        self.tower_calls = 0
        self._usage = GivenUsage(0.0, 0, 0)
        self.reason_to_pad: str | None = None
        if tower.family.both_ways:
            self.reason_to_pad = (
                "the tokens of an image see each other both ways, as only the mask of padded rows"
                " says"
            )

    @property
    def tower(self) -> ImageTower | TowerInModel:
        """What runs the images."""
        return self._tower

    def with_tower(self, tower: ImageTower) -> ImageStore:
        """A store of the same prompts for a model with another tower."""
        store = ImageStore(self._processor, tower, self._most_pixels, self._most_bytes)
        store._prompts = self._prompts  # also those that get their numbers later
        return store

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """The ids of the model that stand for images, video and sound."""
        return self._processor.placeholder_ids

    def for_rows(
        self, records: Sequence[Mapping[str, Any]], input_ids: Tensor
    ) -> ImageInputs | None:
        """The images of token rows, whose ids are `input_ids` (B, T); None if none has any, and no
        tower trains."""
        inputs = self._inputs(records, input_ids)
        if inputs is None and isinstance(self._tower, TowerInModel):
            index = torch.full_like(input_ids, -1)
            inputs = ImageInputs(self._idle_image, index, family=self._tower.family)
            return inputs.to(self._tower.device)
        return inputs

    @cached_property
    def _idle_image(self) -> ImagePixels:
        """One small image."""
        from PIL import Image

        pixels = self._processor.pixels([Image.new("RGB", (_IDLE_SIDE, _IDLE_SIDE))])
        return ImagePixels(pixels, 0, self._tower.family.images_along).smallest()

    def _inputs(
        self, records: Sequence[Mapping[str, Any]], input_ids: Tensor
    ) -> ImageInputs | None:
        """`for_rows` of a tower that does not train."""
        if not any(record.get(IMAGES) for record in records):
            return None
        input_ids = input_ids.cpu()
        index = torch.full_like(input_ids, -1)
        columns = torch.arange(input_ids.shape[1])
        positions = columns.expand(3, *input_ids.shape).clone()
        offsets = torch.zeros(len(records), dtype=torch.int64)
        distinct = dict[tuple[str, ...], ServedImages]()
        begins = dict[tuple[str, ...], int]()  # of these among the features of all
        tokens = 0
        for row, record in enumerate(records):
            references = tuple(record.get(IMAGES) or ())
            if not references:
                continue
            is_image = _image_tokens(input_ids[row], record, self._processor.image_id)
            in_row = int(is_image.sum())
            if references not in distinct:
                distinct[references] = self._of_row(references, in_row)
                begins[references] = tokens
                tokens += distinct[references].features.tokens
            row_images = distinct[references]
            _check_token_count(references, row_images, in_row)
            index[row, is_image] = begins[references] + torch.arange(in_row)
            axes = self._tower.positions(input_ids[row], is_image, row_images.grid)
            if axes is not None:
                positions[:, row] = axes
                offsets[row] = axes[0, -1] + 1 - len(columns)  # all columns after the images agree
        of_distinct = {row: row_images.features for row, row_images in distinct.items()}
        inputs = ImageInputs(
            _concatenated(list(of_distinct.values())),
            index,
            family=self._tower.family,
            tokens_of_images={row: features.tokens for row, features in of_distinct.items()},
        )
        if self._tower.family.has_axes:
            inputs = replace(inputs, positions=positions, offsets=offsets)
        return inputs.to(self._tower.device)

    def for_same_rows(self, given: Any) -> ImageInputs | None:
        """What the model of this store, whose tower is frozen, gets for rows for which another
        store gave `given` (`ImageInputs`); None if no row has an image. Both models read the same
        tokens, at the same positions."""
        if given is None or not given.tokens_of_images:
            return None
        features = []
        for references, tokens in given.tokens_of_images.items():
            row_images = self._of_row(references, tokens)
            _check_token_count(references, row_images, tokens)
            features.append(row_images.features)
        joined = _concatenated(features).to(given.index.device)
        return replace(given, features=joined, family=self._tower.family)

    def number_prompts(self, prompts: Dataset) -> None:
        """Give the rows of a data set of prompts their numbers, after those that have some."""
        if all(numbered is not prompts for numbered in self._prompts):
            self._prompts.append(prompts)

    def prompt_columns(self, prompts: Dataset, indices: Sequence[int]) -> dict[str, Tensor]:
        """The numbers of the prompts at `indices`, -1 for those without an image."""
        if IMAGES not in prompts.column_names:
            return {ROW_OF_IMAGES: torch.full((len(indices),), -1)}
        self.number_prompts(prompts)
        first = 0
        for numbered in self._prompts:
            if numbered is prompts:
                break
            first += len(numbered)
        prompt_numbers = [first + index if prompts[index][IMAGES] else -1 for index in indices]
        return {ROW_OF_IMAGES: torch.tensor(prompt_numbers, dtype=torch.int64)}

    def _record(self, prompt_number: int) -> dict[str, Any]:
        """The token row with this number; of -1 one without images."""
        if prompt_number < 0:
            return {}
        for prompts in self._prompts:
            if prompt_number < len(prompts):
                record: dict[str, Any] = prompts[prompt_number]
                return record
            prompt_number -= len(prompts)
        raise IndexError(f"no prompt has the number {prompt_number} after those of all data sets")

    def take_usage(self) -> GivenUsage:
        """Rows that were asked for and that were kept, and seconds of the tower, with the pixels
        that it gets."""
        with self._lock:
            usage = self._usage
            self._usage = GivenUsage(0.0, 0, 0)
        return usage

    def records_of(self, prompts: PromptBatch | Rollout) -> list[dict[str, Any]]:
        """The token rows of prompts; {} of those without an image."""
        prompt_numbers = [-1] * len(prompts.prompt_ids)
        if ROW_OF_IMAGES in prompts.extra:
            prompt_numbers = prompts.extra[ROW_OF_IMAGES].tolist()
        return [self._record(prompt_number) for prompt_number in prompt_numbers]

    def for_prompts(self, prompts: PromptBatch, model: PreTrainedModel) -> GivenPrompts:
        """The images of prompts; the tower runs when they are asked for. One that trains is that of
        `model` as it is now, so what it makes is kept for these prompts alone."""
        store = self
        if isinstance(self._tower, TowerInModel):
            store = self.with_tower(self._tower.of_model(model))
            store._store_of_pixels = self
        records_of_prompts = self.records_of(prompts)
        lengths = prompts.prompt_mask.sum(dim=1).tolist()
        rows = prompts.prompt_ids.cpu()

        def given(indices: Sequence[int], width: int) -> ImageInputs | None:
            """The images of the prompts at `indices`, in the first `width` columns."""
            # all columns of a prompt, since a token after the images tells its offset
            ids = torch.zeros(len(indices), max(width, rows.shape[1]), dtype=torch.int64)
            records = []
            for row, index in enumerate(indices):
                length = lengths[index]
                ids[row, :length] = rows[index, rows.shape[1] - length :]
                records.append(records_of_prompts[index])
            inputs = store.for_rows(records, ids)
            if inputs is None:
                return None
            return inputs.of_rows(torch.arange(len(indices)), width)

        return given

    def for_rollout(self, rows: Rollout) -> ImageInputs | None:
        """The images of the `full_sequences` of rows; of several contexts, in the first."""
        sequences = row_sequences(rows)
        prompt_numbers = torch.full_like(sequences.rows, -1)
        if ROW_OF_IMAGES in rows.extra:
            prompt_numbers = rows.extra[ROW_OF_IMAGES][sequences.rows]
        is_first = sequences.starts < rows.prompt_ids.shape[1]
        prompt_numbers = torch.where(is_first, prompt_numbers, -1)
        is_frozen = isinstance(self._tower, ImageTower)
        if is_frozen and not bool((prompt_numbers >= 0).any()):
            return None
        input_ids, _ = full_sequences(rows)
        return self.for_rows(
            [self._record(prompt_number) for prompt_number in prompt_numbers.tolist()], input_ids
        )

    def for_probe(self, input_ids: Tensor) -> tuple[Tensor, ImageInputs]:
        """Ids (B, T) with two images of noise, the same in all rows, and their features."""
        ids = input_ids.clone()
        columns = torch.tensor(_PROBE_COLUMNS, device=ids.device)
        ids[ids == self._processor.image_id] = 0
        ids[:, columns] = self._processor.image_id
        index = torch.full_like(ids, -1)
        index[:, columns] = torch.arange(len(columns), device=ids.device)
        features = self._tower.noise(len(columns))
        positions = None
        if self._tower.family.has_axes:
            slots = torch.arange(ids.shape[1], device=ids.device)
            positions = slots.expand(3, *ids.shape).clone()
            positions[1, :, columns] += 1  # of the axes, two go through an image as through a text
        inputs = ImageInputs(features, index, positions, family=self._tower.family)
        return ids, inputs.to(ids.device)

    def for_probe_prompts(self, prompts: PromptBatch) -> tuple[PromptBatch, GivenPrompts]:
        """Prompts (B, P) with two images of noise, of 2 x 2 tokens, where they are long enough;
        with one, or none, where they are shorter."""
        lengths = prompts.prompt_mask.sum(dim=1)
        columns = torch.arange(prompts.prompt_ids.shape[1], device=lengths.device)
        index = torch.full_like(prompts.prompt_ids, -1)  # of a token by its column in the row
        positions = columns.expand(3, *index.shape).clone()
        offsets = torch.zeros_like(lengths)
        axes = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]], device=lengths.device)
        for image, start in enumerate(_PROBE_STARTS):
            end = start + _PROBE_TOKENS
            has_image = lengths > end  # a text follows
            index[has_image, start:end] = image * _PROBE_TOKENS + columns[:_PROBE_TOKENS]
            positions[:, has_image, start:end] = start - 2 * image + axes.unsqueeze(1)
            positions[:, has_image, end:] -= 2  # an image of two rows takes two positions
            offsets[has_image] -= 2
        features = self._tower.noise(_PROBE_TOKENS * len(_PROBE_STARTS))
        inputs = ImageInputs(features, index, family=self._tower.family).to(lengths.device)
        if self._tower.family.has_axes:
            inputs = replace(inputs, positions=positions, offsets=offsets)

        def given(indices: Sequence[int], width: int) -> ImageInputs:
            """The images of the prompts at `indices`, in the first `width` columns."""
            chosen = torch.tensor(indices, dtype=torch.int64, device=lengths.device)
            return inputs.widened(width).of_rows(chosen, width)

        row_columns = columns - (len(columns) - lengths).unsqueeze(1)  # below 0 in the padding
        is_image = (index.gather(1, row_columns.clamp_min(0)) >= 0) & prompts.prompt_mask
        image_id = self._processor.image_id
        ids = torch.where(prompts.prompt_ids == image_id, 0, prompts.prompt_ids)
        ids = torch.where(is_image, image_id, ids)
        return replace(prompts, prompt_ids=ids), given

    def _of_row(self, references: tuple[str, ...], tokens: int) -> ServedImages:
        """The images of a row, for which it has so many `tokens`: what is kept, or made now."""
        with self._lock:
            usage = replace(self._usage, asked=self._usage.asked + 1)
            if references in self._kept:
                self._usage = replace(usage, kept=usage.kept + 1)
                self._kept.move_to_end(references)
                return self._kept[references]
            begun = time.perf_counter()
            row_images = self._made(references, tokens)
            seconds = usage.seconds + time.perf_counter() - begun
            self._usage = replace(usage, seconds=seconds)
            self._keep(references, row_images)
            return row_images

    def _made(self, references: tuple[str, ...], tokens: int) -> ServedImages:
        """The images of a row: their features by the tower, or their pixels where it trains."""
        pixels = self._pixels(references, tokens)
        grid = {name: value for name, value in pixels.items() if name == "image_grid_thw"}
        if isinstance(self._tower, TowerInModel):
            return ServedImages(ImagePixels(pixels, tokens, self._tower.family.images_along), grid)
        features = self._tower.features(pixels)
        self.tower_calls += 1
        return ServedImages(features.to("cpu"), grid)

    def _pixels(self, references: tuple[str, ...], tokens: int) -> Mapping[str, Tensor]:
        """The pixels of the images of a row: those that another store keeps, or new ones."""
        if self._store_of_pixels is not None:
            served = self._store_of_pixels._of_row(references, tokens).features
            assert isinstance(served, ImagePixels)
            return served.pixels
        images = []
        for reference in references:
            file = ImageFile.of(reference)
            images.append(decoded_image(file.content(), self._most_pixels))
        return self._processor.pixels(images)

    def _keep(self, references: tuple[str, ...], row_images: ServedImages) -> None:
        """Keep the images of a row, and drop those that were not used for the longest time."""
        if row_images.features.bytes > self._most_bytes:
            return
        self._kept[references] = row_images
        self._kept_bytes += row_images.features.bytes
        while self._kept_bytes > self._most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.features.bytes


def _check_token_count(references: Sequence[str], row_images: ServedImages, tokens: int) -> None:
    """Refuse images of a row of which the tower makes another number of tokens than the row has."""
    count = row_images.features.tokens
    if count != tokens:
        name = ImageFile.of(references[0]).path
        raise UserError(
            f"{name}: the vision tower gives {count} tokens, but the row has {tokens}, by another"
            " processor"
        )


def _concatenated(of_rows: Sequence[ImageFeatures | ImagePixels]) -> ImageFeatures | ImagePixels:
    """What the model gets of the images of several rows, one after another."""
    features = [row for row in of_rows if isinstance(row, ImageFeatures)]
    pixels = [row for row in of_rows if isinstance(row, ImagePixels)]
    if pixels:
        return joined_pixels(pixels)
    return joined_features(features)


def _image_tokens(ids: Tensor, record: Mapping[str, Any], image_id: int) -> Tensor:
    """(T,) bool, True on the tokens of images, `image_id` within the spans of the row."""
    is_image = torch.zeros_like(ids, dtype=torch.bool)
    for start, end in record[SPANS]:
        is_image[start:end] = ids[start:end] == image_id
    return is_image
