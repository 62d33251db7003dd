"""What is kept of images, settings of processors, and what does not go with images yet."""

import json
import subprocess
import sys

import pytest
import torch
from features.images.image_runs import flags, prepared, source_of, write_pictures, write_rows
from tiny_models import new_model
from tiny_vlms import save_tiny_vlm, tiny_vlm_tokenizer
from transformers import AutoModelForImageTextToText

from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import collate_sft
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.checks import check_trained_model
from dschat_ppo.features.images.content import IMAGES
from dschat_ppo.features.images.processors import load_processor
from dschat_ppo.features.images.saved_parts import beside_of
from dschat_ppo.features.images.step_data import read_by_model
from dschat_ppo.models.loading import check_causal_lm, load_config

QUESTION = "what is the colour of this picture ?"
ROWS = [
    {"image": name, "prompt": QUESTION, "response": "red"} for name in ("a.png", "b.png", "a.png")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("store")
    save_tiny_vlm(made / "idefics3", "idefics3")
    write_pictures(made)
    write_rows(made, ROWS)
    return made


def by_picture(rows):
    """The numbers of the rows in the order of their pictures: two of `a.png`, one of `b.png`."""
    return sorted(range(len(rows)), key=lambda index: rows[index][IMAGES][0].split()[1])


@pytest.mark.parametrize(("gigabytes", "calls"), [("2", 2), ("0", 6), ("0.000006", 6)])
def test_the_tower_runs_once_for_each_image_that_is_kept(folder, gigabytes, calls):
    """Three batches of three rows, of which two have the same picture. 20 and 12 tokens of 64
    numbers take 5120 and 3072 bytes, so that 6000 hold one of the two."""
    words = ["--image_cache_gb", gigabytes]
    vlm = folder / "idefics3"
    rows, config, tokenizer = prepared(vlm, folder / "rows.jsonl", *words)
    store = source_of(config, str(vlm), tokenizer, torch.device("cpu"))
    for _ in range(3):
        batch = collate_sft(rows, by_picture(rows), 0, False, store.for_rows)
    assert store.tower_calls == calls
    # a micro-batch holds the features of an image once
    assert len(batch.given.features.states) == 20 + 12
    assert torch.equal(batch.given.index[0], batch.given.index[1])


def test_the_order_of_rows_does_not_change_a_bit(folder):
    vlm = folder / "idefics3"
    rows, config, tokenizer = prepared(vlm, folder / "rows.jsonl")
    store = source_of(config, str(vlm), tokenizer, torch.device("cpu"))
    first, _, last = by_picture(rows)
    both = collate_sft(rows, [first, last], 0, False, store.for_rows).given.features.states
    alone = collate_sft(rows, [last], 0, False, store.for_rows).given.features.states
    assert torch.equal(both[20:], alone)
    text_row = dict(rows[0]) | {IMAGES: []}
    assert store.for_rows([text_row], torch.zeros(1, 4, dtype=torch.int64)) is None


def test_a_file_that_changes_between_two_steps_ends_the_run(folder, tmp_path):
    """By its name, when it is needed again."""
    vlm = folder / "idefics3"
    write_pictures(tmp_path)
    data = write_rows(tmp_path, ROWS)
    rows, config, tokenizer = prepared(vlm, data, "--image_cache_gb", "0")
    store = source_of(config, str(vlm), tokenizer, torch.device("cpu"))
    first, _, last = by_picture(rows)
    collate_sft(rows, [first, last], 0, False, store.for_rows)
    (tmp_path / "d.png").replace(tmp_path / "a.png")
    collate_sft(rows, [last], 0, False, store.for_rows)
    with pytest.raises(UserError, match=r"a\.png: the image has changed since"):
        collate_sft(rows, [first], 0, False, store.for_rows)


def test_a_model_without_a_usable_processor_is_refused_by_its_flag(folder, tmp_path):
    tokenizer = tiny_vlm_tokenizer("idefics3")
    config = load_config(str(folder / "idefics3"), "")

    def said_of(tmp_path):
        """Why its processor cannot be used."""
        with pytest.raises(UserError) as refusal:
            print(load_processor(config, "--model", str(tmp_path), tokenizer, {}, None).placeholder)
        return str(refusal.value)

    assert said_of(tmp_path).startswith(f"--model {tmp_path}: has no processor of images")
    file = tmp_path / "preprocessor_config.json"
    file.write_text("{")
    assert said_of(tmp_path).startswith(f"--model {tmp_path}: its processor of images cannot be lo")
    file.write_bytes((folder / "idefics3" / file.name).read_bytes())
    (tmp_path / "processor_config.json").write_text("{")
    said = said_of(tmp_path)
    assert said.startswith(f"--model {tmp_path}/processor_config.json: cannot be used")


def test_a_column_that_the_data_do_not_have_is_refused(folder):
    with pytest.raises(UserError, match="--image_column picture: no data set has such a column"):
        prepared(folder / "idefics3", folder / "rows.jsonl", "--image_column", "picture")


def test_options_change_the_tokens_and_are_saved(folder, tmp_path):
    vlm = folder / "idefics3"
    words = ["--image_options", "do_image_splitting=false"]
    rows, config, _ = prepared(vlm, folder / "rows.jsonl", *words)
    assert rows[0]["prompt_ids"].count(load_config(str(vlm), "").image_token_id) == 4
    model = AutoModelForImageTextToText.from_pretrained(vlm)
    beside_of(config).write_files(model, tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert saved["do_image_splitting"] is False
    assert (tmp_path / "processor_config.json").exists()
    with pytest.raises(UserError, match="--image_options patches: .* has no such setting"):
        prepared(vlm, folder / "rows.jsonl", "--image_options", "patches=4")
    with pytest.raises(UserError, match="--image_max_pixels 9: .* divides images into tiles"):
        prepared(vlm, folder / "rows.jsonl", "--image_max_pixels", "9")


def test_fewer_pixels_for_a_model_of_qwen(folder, tmp_path):
    vlm = save_tiny_vlm(tmp_path / "qwen", "qwen3_vl")
    placeholder = load_config(str(vlm), "").image_token_id
    for pixels, tokens in (("1024", 16), ("256", 4)):  # of 8 x 8 pixels each
        rows, *_ = prepared(vlm, folder / "rows.jsonl", "--image_max_pixels", pixels)
        assert rows[by_picture(rows)[0]]["prompt_ids"].count(placeholder) == tokens


@pytest.mark.parametrize(
    "words",
    [
        ["--streaming", "True", "--streaming_rows", "8"],
        ["--sequence_parallel_size", "2"],
        ["--resize_vocabulary", "True"],
    ],
    ids=lambda words: words[0],
)
def test_flags_that_do_not_go_with_images_yet(folder, words):
    vlm = str(folder / "idefics3")
    config = parse("sft", flags(vlm, folder / "rows.jsonl", *words))
    with pytest.raises(UserError, match="sees images, which do not go with"):
        check_trained_model(config, load_config(vlm, ""), vlm)


def test_models_and_steps_that_take_no_images(folder, tmp_path):
    vlm = str(folder / "idefics3")
    with pytest.raises(UserError, match="sees images, but a model of text is needed here"):
        check_causal_lm(vlm)
    text_model = new_model("llama")
    text_model.save_pretrained(tmp_path)
    words = flags(tmp_path, folder / "rows.jsonl", "--image_column", "image")
    config = parse("sft", words)
    with pytest.raises(UserError, match="--image_column image: .* sees no images"):
        read_by_model(config, config.step_data, str(tmp_path), None)


def test_a_run_without_images_does_not_need_pillow():
    """Hooks do not import the modules that need it, which do so inside functions alone
    (`test_dependencies.py`)."""
    code = (
        "import sys\n"
        "from dschat_ppo.features import hooks\n"
        "for name in ('lm_kinds.kinds_of', 'given_embeddings.sources_of_roles',\n"
        "             'saved_parts.beside_of',\n"
        "             'step_data.read_by_model', 'checks.check_trained_model',\n"
        "             'checks.check_readers', 'prompt_contents.content_of'):\n"
        "    assert hooks(name), name\n"
        "images = 'dschat_ppo.features.images'\n"
        "for name in ('image_store', 'processors', 'content'):\n"
        "    assert f'{images}.{name}' not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
