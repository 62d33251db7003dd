"""Images in data rows: where they may stand, files that cannot be used, their tokens, and the
length limit."""

import base64
import io
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from features.images.image_runs import prepared, write_pictures, write_rows
from PIL import Image
from tiny_vlms import FAMILIES, PARTS_TEMPLATE, noise, save_tiny_vlm

from dschat_ppo.data.content_marks import mark_of
from dschat_ppo.data.templates import render
from dschat_ppo.errors import UserError
from dschat_ppo.features.images.content import IMAGES, SPANS
from dschat_ppo.features.images.image_files import ImageFile, decoded_image
from dschat_ppo.features.images.processors import load_processor
from dschat_ppo.features.images.references import ImagePlaces
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.tokenizers import load_tokenizer

QUESTION = "what is the colour of this picture ?"
PATH = "a.png"
PICTURE = ("--image_column", "picture")


@pytest.fixture(scope="module")
def vlms(tmp_path_factory):
    """Family -> folder of a tiny model."""
    folder = tmp_path_factory.mktemp("vlms")
    return {family: save_tiny_vlm(folder / family, family) for family in FAMILIES}


@pytest.fixture
def pictures(tmp_path):
    write_pictures(tmp_path)
    return tmp_path


def as_url(path):
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def talk(*content, answer="red"):
    return {
        "messages": [
            {"role": "user", "content": list(content)},
            {"role": "assistant", "content": answer},
        ]
    }


TEXT = {"type": "text", "text": QUESTION}


def rows_of_every_form(folder):
    """Rows that all ask the same about `a.png`."""
    url = as_url(folder / PATH)
    return [
        talk({"type": "image", "image": PATH}, TEXT),
        talk({"type": "image", "path": PATH}, TEXT),
        talk({"type": "image", "url": url}, TEXT),
        talk({"type": "image", "base64": url.partition(",")[2]}, TEXT),
        talk({"type": "image_url", "image_url": {"url": url}}, TEXT),
        talk({"type": "image"}, TEXT) | {"images": [PATH]},
        talk({"type": "text", "text": f"<image>{QUESTION}"}) | {"image": PATH},
        talk(TEXT) | {"image": {"path": PATH}},
        talk(TEXT) | {"images": f'["{PATH}"]'},
    ]


def test_the_same_picture_in_every_place_gives_the_same_tokens(vlms, pictures):
    data = write_rows(pictures, rows_of_every_form(pictures))
    rows, *_ = prepared(vlms["idefics3"], data, "--bad_rows", "error")
    assert len(rows) == 9
    for name in ("prompt_ids", "answers", SPANS, "digest"):
        assert all(row[name] == rows[0][name] for row in rows), name
    assert {ImageFile.of(row[IMAGES][0]).sha for row in rows} == {
        ImageFile.of(rows[0][IMAGES][0]).sha
    }


@pytest.mark.parametrize(
    "row",
    [
        {"image": PATH, "prompt": QUESTION, "response": "red"},
        {"image": PATH, "instruction": QUESTION, "output": "red"},
        {"image": PATH, "question": QUESTION, "answer": "red"},
        {"picture": PATH, "prompt": QUESTION, "response": "red"},
        {
            "image": PATH,
            "conversations": [
                {"from": "human", "value": f"<image>{QUESTION}"},
                {"from": "gpt", "value": "red"},
            ],
        },
    ],
    ids=["prompt", "alpaca", "question", "named column", "sharegpt"],
)
def test_a_column_of_images_beside_every_form(vlms, pictures, row):
    data = write_rows(pictures, [row])
    further = PICTURE if "picture" in row else []
    [token_row], _, tokenizer = prepared(vlms["qwen3_vl"], data, *further)
    text = tokenizer.decode(token_row["prompt_ids"])
    assert text.count("<|image_pad|>") == 16  # 32 x 32 in patches of 4, joined 2 x 2
    [[start, end]] = token_row[SPANS]
    assert end - start == 16


SETS = {
    "named": {"picture": PATH, "prompt": QUESTION, "response": "red"},
    "usual": {"image": PATH, "prompt": QUESTION, "response": "red"},
    "texts": {"prompt": QUESTION, "response": "red"},
    "parts": talk({"type": "image", "image": PATH}, TEXT),
}


def write_sets(folder, *names):
    """Words of data sets of one row each."""
    for name in names:
        (folder / f"{name}.jsonl").write_text(json.dumps(SETS[name]) + "\n")
    return ["--data_path", *(str(folder / f"{name}.jsonl") for name in names)]


@pytest.mark.parametrize(
    ("value", "is_warned_of"),
    [
        (PATH, True),
        ([PATH, "b.JPG"], True),
        ({"path": PATH, "bytes": None}, True),
        ("data:image/png;base64,AAAA", True),
        ("the picture a.png shows a circle", False),
        (["a", PATH], False),
        (3, False),
    ],
)
def test_a_column_that_seems_to_hold_images_is_not_passed_over_in_silence(
    vlms, pictures, said, value, is_warned_of
):
    row = {"photo": value, "prompt": QUESTION, "response": "red"}
    data = write_rows(pictures, [row])
    warning = "column 'photo' seems to hold images, which are not read; --image_column photo"
    prepared(vlms["idefics3"], data)
    assert any(warning in line for line in said) == is_warned_of
    said.clear()
    prepared(vlms["idefics3"], data, "--ignore_columns", "photo")
    assert not any(warning in line for line in said)


def test_a_data_set_without_the_named_column_is_read_as_without_the_flag(vlms, pictures, said):
    words = write_sets(pictures, *SETS)
    rows, *_ = prepared(vlms["idefics3"], pictures / "named.jsonl", *words, *PICTURE)
    images = {name: len(rows[index][IMAGES]) for index, name in enumerate(SETS)}
    assert images == {"named": 1, "usual": 1, "texts": 0, "parts": 1}
    assert rows[0]["prompt_ids"] == rows[1]["prompt_ids"] == rows[3]["prompt_ids"]
    lacking = [line.partition("/")[2] for line in said if "(--image_column)" in line]
    assert [line.rpartition("/")[2] for line in lacking] == [
        "usual.jsonl: has no column 'picture' (--image_column); its images are read from 'image'",
        *(
            f"{name}.jsonl: has no column 'picture' (--image_column); its rows are text, unless"
            " their messages hold images"
            for name in ("texts", "parts")
        ),
    ]


def test_a_named_column_may_be_that_of_a_data_set_for_evaluation(vlms, pictures):
    words = write_sets(pictures, "texts", "named")
    held_out = ["--eval_data_path", words.pop()]
    texts = pictures / "texts.jsonl"
    [row], *_ = prepared(vlms["idefics3"], texts, *words, *held_out, *PICTURE)
    assert row[IMAGES] == []


def test_a_column_of_no_data_set_is_refused_with_what_they_have(vlms, pictures):
    words = write_sets(pictures, "usual", "texts")
    with pytest.raises(UserError, match="--image_column picture: no data set has") as refusal:
        prepared(vlms["idefics3"], pictures / "usual.jsonl", *words, *PICTURE)
    assert "usual.jsonl has 'image', 'prompt', 'response'; " in str(refusal.value)
    assert str(refusal.value).endswith("texts.jsonl has 'prompt', 'response'")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ids_are_those_of_the_processor_of_the_family(vlms, pictures, family):
    names = ("b.png", "c.png", "a.png")
    first, *neighbours = [{"type": "image", "image": name} for name in names]
    row = talk(first, TEXT, *neighbours, TEXT)
    [token_row], _, tokenizer = prepared(vlms[family], write_rows(pictures, [row]))
    config = load_config(str(vlms[family]), "model")
    processor = load_processor(config, "--model", str(vlms[family]), tokenizer, {}, None)
    text = tokenizer.apply_chat_template(
        row["messages"][:1], tokenize=False, add_generation_prompt=True
    )
    images = [Image.open(pictures / name).convert("RGB") for name in names]
    encoded = processor._of_texts(text=[text], images=[images], add_special_tokens=False)
    assert token_row["prompt_ids"] == list(encoded["input_ids"][0])


def rows_with_bytes(pictures):
    """Two rows as `datasets` stores images, one of them with bytes that are none."""
    images = [(pictures / PATH).read_bytes(), b"no image"]
    struct = [{"bytes": content, "path": "x.png"} for content in images]
    return {"image": struct, "prompt": [QUESTION] * 2, "response": ["red", "blue"]}


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
def test_images_inside_of_tables(vlms, pictures, kind):
    columns = rows_with_bytes(pictures)
    if kind == "parquet":
        data = pictures / "rows.parquet"
        pq.write_table(pa.table(columns), data)
    else:
        data = pictures / "saved"
        table = Dataset.from_dict(columns)
        table.cast_column("image", datasets.Image(decode=False)).save_to_disk(data)
    rows, *_ = prepared(vlms["idefics3"], data, "--bad_rows", "skip")
    assert len(rows) == 1
    file = ImageFile.of(rows[0][IMAGES][0])
    assert file.content() == (pictures / PATH).read_bytes()
    [of_path], *_ = prepared(
        vlms["idefics3"],
        write_rows(pictures, [{"image": PATH, "prompt": QUESTION, "response": "red"}]),
    )
    assert of_path["digest"] == rows[0]["digest"]


# Bad rows


def bad(vlm, pictures, row, *further):
    """What is said of a row that cannot be used."""
    data = write_rows(pictures, [row])
    with pytest.raises(UserError) as raised:
        prepared(vlm, data, "--bad_rows", "error", *further)
    return str(raised.value)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("missing.png", "--image_folder"),
        ("https://example.com/a.png", "not fetched from the web"),
        ("../a.png", "outside of"),
        ("/etc/hostname", "outside of"),
        ("truncated.png", "cannot be decoded"),
        ("text.png", "cannot be decoded"),
        ("long.png", "200 times"),
        (3, "expected a path"),
        ("data:image/png;base64,!!", "not base64"),
    ],
)
def test_an_image_that_cannot_be_used_is_a_bad_row(vlms, pictures, image, words):
    content = (pictures / "a.png").read_bytes()
    (pictures / "truncated.png").write_bytes(content[: len(content) // 2])
    (pictures / "text.png").write_text("no image")
    noise(1, 500, 0).save(pictures / "long.png")
    folder = pictures / "data"
    folder.mkdir()
    for name in ("truncated.png", "text.png", "long.png"):
        (pictures / name).rename(folder / name)
    row = {"image": image, "prompt": QUESTION, "response": "red"}
    said = bad(vlms["idefics3"], folder, row)
    assert words in said and "row 1" in said


def test_a_link_does_not_lead_out_of_the_folder(vlms, pictures):
    folder = pictures / "data"
    folder.mkdir()
    (folder / "a.png").symlink_to(pictures / "a.png")
    row = {"image": "a.png", "prompt": QUESTION, "response": "red"}
    assert "outside of" in bad(vlms["idefics3"], folder, row)
    data = write_rows(folder, [row])
    assert len(prepared(vlms["idefics3"], data, "--image_folder", str(pictures))[0]) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (talk({"type": "image"}, TEXT), "more places for images than images"),
        (talk({"type": "image"}, TEXT) | {"images": [PATH, PATH]}, "has 2 images"),
        (talk({"type": "video", "video": "a.mp4"}, TEXT), "'video'"),
        (talk(TEXT, answer=[{"type": "image", "image": PATH}]), "a model answers in text"),
        (
            talk({"type": "text", "text": "what is <image> ?"}),
            "a text holds '<image>', which stands for an image to this model; write it otherwise",
        ),
        (talk(TEXT, answer="<image> red"), "a text holds '<image>', which stands for an image"),
    ],
)
def test_places_and_images_that_do_not_fit_are_a_bad_row(vlms, pictures, row, words):
    assert words in bad(vlms["idefics3"], pictures, row)


def test_a_template_that_writes_another_image_is_named(vlms, pictures):
    template = pictures / "twice.jinja"
    second = "{% if loop.index == 3 %} <image>{% endif %} <|im_end|>"
    template.write_text(PARTS_TEMPLATE.replace(" <|im_end|>", second))
    row = talk({"type": "image", "image": PATH}, TEXT)
    row["messages"] += row["messages"]
    row["messages"][2] = {"role": "user", "content": QUESTION}
    said = bad(vlms["idefics3"], pictures, row, "--chat_template", str(template))
    assert "the chat template writes '<image>', which stands for an image, 2 times for 1 im" in said
    assert "thoughts, calls, tools and variables" in said  # which may be what holds it
    assert "a text holds" not in said


def test_a_huge_image_is_refused_before_it_is_decoded(vlms, pictures):
    row = {"image": PATH, "prompt": QUESTION, "response": "red"}
    said = bad(vlms["idefics3"], pictures, row, "--image_max_source_pixels", "1000")
    assert "32 x 32 pixels" in said and "--image_max_source_pixels 1000" in said


# Decoding


def encoded(image, kind="PNG", **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def test_pictures_of_every_kind_become_rgb():
    red = Image.new("RGB", (4, 2), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decoded_image(encoded(red, "JPEG", exif=exif), 100).size == (2, 4)
    assert decoded_image(encoded(red.convert("CMYK"), "TIFF"), 100).mode == "RGB"
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert decoded_image(encoded(clear), 100).getpixel((0, 0)) == (255, 255, 255)
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    animated = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decoded_image(animated, 100).getpixel((0, 0)) == (255, 0, 0)
    grey = decoded_image(encoded(Image.new("L", (2, 2), 128)), 100)
    assert grey.getpixel((1, 1)) == (128, 128, 128)


def test_a_file_that_changes_later_is_named(tmp_path):
    write_pictures(tmp_path)
    places = ImagePlaces(None, (), str(tmp_path), str(tmp_path / "store"))
    _, [value] = places.taken_out({"image": PATH, "prompt": QUESTION})
    file = places.file_of(value)
    assert ImageFile.of(file.reference).content() == (tmp_path / PATH).read_bytes()
    noise(32, 32, 9).save(tmp_path / PATH)
    with pytest.raises(UserError, match=r"a\.png: the image has changed"):
        file.content()
    (tmp_path / PATH).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        file.content()


# The length limit


@pytest.mark.parametrize(("policy", "first"), [("left", "colour"), ("right", "what")])
def test_no_image_is_cut(vlms, pictures, policy, first):
    row = talk({"type": "image", "image": "b.png"}, TEXT)
    data = write_rows(pictures, [row])
    [whole], _, tokenizer = prepared(vlms["idefics3"], data)
    tokens = len(whole["prompt_ids"]) + len(whole["answers"][0])
    limit = ["--max_seq_len", str(tokens - 3), "--truncation", policy]
    [cut], *_ = prepared(vlms["idefics3"], data, *limit)
    assert len(cut["prompt_ids"]) == len(whole["prompt_ids"]) - 3
    [[start, end]] = cut[SPANS]
    [[whole_start, whole_end]] = whole[SPANS]
    expected = whole["prompt_ids"][whole_start:whole_end]
    assert cut["prompt_ids"][start:end] == expected
    left = tokenizer.decode(cut["prompt_ids"])
    words = QUESTION.split()
    assert (words[0] in left) == (policy == "right")
    assert left.endswith("<|im_start|> assistant :") and first in left


def test_a_row_whose_images_alone_are_too_long_is_dropped(vlms, pictures, caplog):
    short = {"image": "a.png", "prompt": "what ?", "response": "red"}
    long = {"image": ["a.png", "c.png"], "prompt": "what ?", "response": "red"}
    data = write_rows(pictures, [short, long])
    with caplog.at_level("INFO"):
        rows, *_ = prepared(vlms["idefics3"], data, "--max_seq_len", "70")
    assert len(rows) == 1 and len(rows[0][IMAGES]) == 1
    assert "1 dropped" in caplog.text
    # 32 x 32 and 64 x 40 are four tiles and the whole, of 4 tokens each, with their marks
    tokens = rows[0][SPANS][0][1] - rows[0][SPANS][0][0]
    said = f"2 rows with images, of {tokens} tokens in the median and {tokens} at most"
    assert said in caplog.text


# Templates


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_templates_of_parts_and_of_texts(vlms, family):
    """SmolVLM's template takes lists of parts alone, Qwen's take texts too."""
    tokenizer = load_tokenizer(str(vlms[family]), "model")
    message = {"role": "user", "content": f"first {mark_of(0)} second"}
    text = render(tokenizer, [message, {"role": "assistant", "content": "red"}], False)
    place = {"idefics3": " <image>", "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
    assert f"first {place[family]}" in text and text.endswith(" red <|im_end|>")


def test_a_template_without_images_is_refused(vlms, pictures, tmp_path):
    row = {"image": PATH, "prompt": QUESTION, "response": "red"}
    said = bad(vlms["qwen3_vl"], pictures, row, "--chat_template", "chatml")
    assert "chat template" in said
