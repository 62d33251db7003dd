"""Cases of `fuzz.py` for images: pictures of every format, mode and size, broken or not, their
places in data rows, and the files of processors."""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_cases import (
    ROOT,
    copy_of,
    mutate_bytes,
    mutate_file,
    mutate_json,
    note,
    run_step_until_models,
)

_FAMILIES = ("idefics3", "qwen3_vl")
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "ICO", "TGA")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "F")
_SIDES = (1, 2, 3, 7, 32, 33, 200, 201, 500, 5000)
_MOST_PIXELS = 300_000
_PICTURES = 12  # of a case that decodes them
_ORIENTATIONS = (1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 65535)
_ROWS = 6
_SETTINGS = (
    ("--image_max_source_pixels", ("1", "1000", "64000000")),
    ("--image_column", ("picture", "image", "nothing")),
    ("--image_folder", (".", "missing", "/")),
    ("--image_options", ("size=1", "do_resize=false", "size={}", "x=1", "do_resize=null")),
    ("--image_max_pixels", ("1", "256", "100000000")),
    ("--with_images", ("True", "False")),
    ("--truncation", ("left", "drop", "error")),
    ("--max_seq_len", ("1", "8", "4000")),
)


def make_pictures(material: Path) -> None:
    """Write the models that see images."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny_vlms import save_tiny_vlm

    for family in _FAMILIES:
        save_tiny_vlm(material / family, family)


def picture(rng: random.Random) -> tuple[bytes, str]:
    """The content of a file with a picture, and what it is."""
    from PIL import Image

    kind = rng.choice(_FORMATS)
    mode = rng.choice(_MODES)
    width, height = rng.choice(_SIDES), rng.choice(_SIDES)
    if width * height > 4 * _MOST_PIXELS:
        height = 1 + _MOST_PIXELS // width
    image = Image.new("RGB", (width, height), (rng.randrange(256), rng.randrange(256), 7))
    settings: dict[str, Any] = {}
    if rng.random() < 0.3:
        exif = Image.Exif()
        exif[0x0112] = rng.choice(_ORIENTATIONS)
        settings["exif"] = exif
        if rng.random() < 0.3:
            settings["exif"] = b"Exif\0\0II*\0" + rng.randbytes(20)
    if rng.random() < 0.2:
        settings |= {"save_all": True, "append_images": [image.rotate(90)]}
    file = io.BytesIO()
    try:
        image.convert("L").convert(mode).save(file, kind, **settings)
    except Exception:  # noqa: BLE001  Pillow raises anything for a mode that a format lacks
        file = io.BytesIO()
        mode = "RGB"
        image.save(file, kind)
    return file.getvalue(), f"{kind} {mode} {width}x{height} {sorted(settings)}"


def _plain_picture() -> bytes:
    """A PNG that each model can use."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (40, 20), "red").save(file, "PNG")
    return file.getvalue()


def mutated_picture(rng: random.Random) -> tuple[bytes, str]:
    """That of a file whose content is broken in most cases."""
    content, what = picture(rng)
    if rng.random() < 0.3:
        return content, what
    changed, done = mutate_bytes(rng, content)
    return changed, f"{what}: {done}"


def pictures_decoded(rng: random.Random, material: Path, own: Path) -> int:
    """Pictures, each of which becomes tokens and pixels that fit, or has a cause."""
    from dschat_ppo.errors import UserError
    from dschat_ppo.features.images.image_files import decoded_image
    from dschat_ppo.features.images.processors import load_processor
    from dschat_ppo.models.loading import load_config
    from dschat_ppo.models.tokenizers import load_tokenizer

    folder = str(material / rng.choice(_FAMILIES))
    tokenizer = load_tokenizer(folder, "model")
    processor = load_processor(load_config(folder, "model"), folder, tokenizer, {}, None)
    for _ in range(_PICTURES):
        content, what = mutated_picture(rng)
        note(what)
        try:
            image = decoded_image(content, _MOST_PIXELS)
            tokens = processor.tokens(image)
            pixels = processor.pixels([image])
        except UserError as problem:
            assert "\n" not in str(problem), problem
            continue
        assert image.mode == "RGB"
        if "image_grid_thw" in pixels:
            assert 4 * tokens.count(processor.image_id) == int(pixels["image_grid_thw"].prod())
        else:
            assert tokens.count(processor.image_id) == 4 * pixels["pixel_values"].shape[1]
    return 0


def _held(rng: random.Random, content: bytes, name: str) -> Any:
    """How a row holds a picture: by the name of its file, or in itself."""
    text = base64.b64encode(content).decode()
    return rng.choice(
        (
            name,
            name,
            [name],
            [name, name],
            {"path": name},
            {"base64": text},
            {"bytes": text, "path": name},
            f"data:image/png;base64,{text}",
            f"http://127.0.0.1:9/{name}",
        )
    )


def _row(rng: random.Random, step: str, held: Any) -> dict[str, Any]:
    """A row about a picture, in a column or in a part of a message."""
    question = rng.choice(("what is this ?", "<image> what is it ?", "a <image> and <image> ?"))
    row: dict[str, Any] = {"image": held, "prompt": question}
    if rng.random() < 0.3:
        part = {"type": rng.choice(("image", "image_url", "video")), "image": held}
        row = {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": question}]}]}
    names = {"sft": ("response",), "ppo": ("answer",)}.get(step, ("chosen", "rejected"))
    for name in names:
        row[name] = rng.choice(("red", "blue circle", "<image>"))
    return row


def _words(rng: random.Random, step: str, vlm: Path, data: Path, own: Path) -> list[str]:
    """The command line of a step."""
    words = ["--data_path", str(data), "--output_dir", str(own / "trained"), "--dtype", "fp32"]
    words += ["--data_output_path", str(own / "cache"), "--max_steps", "2"]
    if step == "ppo":
        words += ["--actor_model_name_or_path", str(vlm), "--use_reward_model", "False"]
        words += ["--reward_function", "exact_match", "--advantage_estimator", "rloo"]
        words += ["--n_samples_per_prompt", "2", "--data_split", "0,0,1"]
    else:
        split = "0,1,0"
        if step == "sft":
            split = "1,0,0"
        words += ["--model_name_or_path", str(vlm), "--data_split", split]
        words += ["--per_device_train_batch_size", "2"]
    for flag, values in _SETTINGS:
        if rng.random() < 0.1:
            if step == "ppo" and flag == "--max_seq_len":
                flag = "--max_prompt_seq_len"
            words += [flag, rng.choice(values)]
    if rng.random() < 0.6:
        words += ["--bad_rows", "skip"]
    return words


def pictures_in_step(rng: random.Random, material: Path, own: Path) -> int:
    """Pictures in data rows of a step."""
    step = rng.choice(("sft", "reward", "dpo", "ppo"))
    rows = []
    for index in range(_ROWS):
        content, what = mutated_picture(rng)
        name = f"{index}.png"
        (own / name).write_bytes(content)
        if rng.random() < 0.1:
            what += f", {mutate_file(rng, own / name)}"
        row: Any = _row(rng, step, _held(rng, content, name))
        if rng.random() < 0.3:
            row, done = mutate_json(rng, row)
            what += f", row: {done}"
        note(what)
        rows.append(row)
    data = own / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    vlm = material / rng.choice((*_FAMILIES, *_FAMILIES, "model"))
    return run_step_until_models(step, _words(rng, step, vlm, data, own))


def processor_in_step(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated file beside the weights of a model that sees images."""
    vlm = copy_of(material / rng.choice(_FAMILIES), own / "vlm")
    files = [path for path in sorted(vlm.iterdir()) if path.suffix != ".safetensors"]
    processors = [path for path in files if "processor" in path.name]
    note(mutate_file(rng, rng.choice((rng.choice(files), rng.choice(processors)))))
    step = rng.choice(("sft", "reward", "dpo", "ppo"))
    (own / "0.png").write_bytes(_plain_picture())
    answers = dict.fromkeys(("response", "chosen", "answer"), "red")
    rows = [{"image": "0.png", "prompt": "what ?", "rejected": "blue", **answers}] * _ROWS
    data = own / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_step_until_models(step, _words(rng, step, vlm, data, own))


IMAGE_KINDS: dict[str, Callable[[random.Random, Path, Path], int]] = {
    "pictures decoded": pictures_decoded,
    "pictures in a step": pictures_in_step,
    "processor of a model": processor_in_step,
}
