"""The processor and, where it does not train, the vision tower beside a trained decoder, in the
folder of the saved model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.images.step_data import processor_of
from dschat_ppo.features.images.tower import load_tower, trains_with_images
from dschat_ppo.models.lm_kinds import parts_beside_decoder
from dschat_ppo.models.model_folders import SCORE
from dschat_ppo.models.saving import SavedBeside
from dschat_ppo.models.tokenizers import read_tokenizer

_USAGE = """\
## How to use it

```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
{imports}
folder = "."  # this folder, or its name on the hub
{model}
processor = AutoProcessor.from_pretrained({processor})  # of some models it needs torchvision
parts = [{{"type": "image"}}, {{"type": "text", "text": "What is this?"}}]
messages = [{{"role": "user", "content": parts}}]
text = processor.apply_chat_template(messages, add_generation_prompt=True)
inputs = processor(text=text, images=[Image.open("picture.png")], return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=100)
print(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```
"""
_SCORE_USAGE = """\
## How to use it

A model with a scalar head, for which transformers has no class: the body as `AutoModel`, and the
head as a matrix. The score of an answer is that at the last token of the conversation.

```python
from pathlib import Path

import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModel, AutoProcessor

folder = "."  # this folder
model = AutoModel.from_pretrained(folder)
processor = AutoProcessor.from_pretrained(folder)  # of some models it needs torchvision
for file in Path(folder).glob("*.safetensors"):
    with safe_open(file, "pt") as tensors:
        if "score.weight" in tensors.keys():
            head = tensors.get_tensor("score.weight")
parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
answer = [{"type": "text", "text": "A cat."}]
messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
text = processor.apply_chat_template(messages)
inputs = processor(text=text, images=[Image.open("picture.png")], return_tensors="pt")
with torch.no_grad():
    states = model(**inputs).last_hidden_state
print((states[0, -1] @ head[0]).item())
```
"""
_SCORE_ADAPTER_USAGE = """\
## How to use it

An adapter with a scalar head, `score.weight`, on the body of `{base}`. Train with `--lora_merge`,
or export the run with `dschat-export`, for a folder that holds the whole model.
"""


def beside_of(config: StepConfig) -> SavedBeside:
    """What is written beside the decoder of a model that sees images."""
    return SavedBeside(
        partial(_tower_weights, config),
        partial(_write_processor, config),
        partial(_usage_with_images, config),
    )


def _start_folder(model: PreTrainedModel) -> str:
    """The folder that the model was loaded from."""
    return str(model.name_or_path)


def _tower_weights(config: StepConfig, model: PreTrainedModel) -> Mapping[str, Tensor]:
    """The weights of the tower, from the folder that the model was loaded from; {} for a model that
    holds its tower itself."""
    if not trains_with_images(config, model.config) or parts_beside_decoder(model):
        return {}
    dtype: Any = model.config.dtype  # that of the weights that are written
    return load_tower(_start_folder(model), dtype, torch.device("cpu")).weights()


def _write_processor(config: StepConfig, model: PreTrainedModel, folder: Path) -> None:
    """Write the files of the processor, with the settings of the flags."""
    if not trains_with_images(config, model.config):
        return
    source = _start_folder(model)
    tokenizer = read_tokenizer(source, "model")
    processor_of(config, model.config, source, tokenizer).save_settings(folder)


def _usage_with_images(config: StepConfig, model: PreTrainedModel, is_adapter: bool) -> str | None:
    """How to use a model that sees images."""
    if not trains_with_images(config, model.config):
        return None
    if hasattr(model, SCORE):
        if is_adapter:
            return _SCORE_ADAPTER_USAGE.format(base=Path(_start_folder(model)).name)
        return _SCORE_USAGE
    if not is_adapter:
        loaded = "model = AutoModelForImageTextToText.from_pretrained(folder)"
        return _USAGE.format(imports="", model=loaded, processor="folder")
    loaded = (
        f'base = "{Path(_start_folder(model)).name}"  # the folder or hub name of the base model\n'
        "model = AutoModelForImageTextToText.from_pretrained(base)\n"
        "model = PeftModel.from_pretrained(model, folder)"
    )
    return _USAGE.format(imports="from peft import PeftModel\n", model=loaded, processor="base")
