"""A random model learns from pictures what no text says: a colour."""

import math
import random

import pytest
from features.images.image_runs import flags, write_rows
from launch import metrics_of, run_steps
from PIL import Image
from tiny_vlms import save_tiny_vlm

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 40),
    "blue": (40, 60, 220),
    "yellow": (230, 220, 40),
}


def write_coloured(folder, count, seed):
    """Pictures with a patch of one of four colours on grey, and the question for it."""
    folder.mkdir()
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        name = list(COLOURS)[number % 4]
        image = Image.new("RGB", (32, 32), (generator.randint(0, 255),) * 3)
        corner = (generator.randint(0, 8), generator.randint(0, 8))
        shade = tuple(channel + generator.randint(-20, 20) for channel in COLOURS[name])
        image.paste(shade, (*corner, generator.randint(20, 32), generator.randint(20, 32)))
        image.save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "prompt": "what is the colour ?", "response": name})
    return write_rows(folder, rows)


def test_the_colour_of_pictures_that_were_not_trained(tmp_path):
    """The loss is the mean over the colour and the end of the answer: who does not see the picture
    cannot get it below ln(4) / 2."""
    vlm = save_tiny_vlm(tmp_path / "vlm", "smolvlm")
    train = write_coloured(tmp_path / "train", 128, seed=0)
    held_out = write_coloured(tmp_path / "held_out", 32, seed=1)
    words = flags(vlm, train, "--eval_data_path", str(held_out), "--max_steps", "24")
    words += ["--per_device_train_batch_size", "32", "--learning_rate", "3e-3"]
    words += ["--num_warmup_steps", "0", "--image_options", "do_image_splitting=false"]
    words += ["--output_dir", str(tmp_path / "out")]
    ended = run_steps({"colours": ("sft", words)}, tmp_path, ranks=1)
    assert ended["colours"]["error"] is None
    losses = [line["eval_loss"] for line in metrics_of(tmp_path / "out") if "eval_loss" in line]
    assert losses[0] > math.log(4) / 2
    assert losses[-1] < 0.35
