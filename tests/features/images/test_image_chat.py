"""`dschat-chat` with models that see pictures: the tokens of transformers' `generate` on the ids of
the model's own processor, and the command `/image`."""

import io
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from features.images.image_runs import write_pictures
from PIL import Image
from tiny_vlms import ASKED, save_tiny_vlm, tiny_vlm_tokenizer
from transformers import AutoModelForImageTextToText

from dschat_ppo.config.feature_flags import FeatureFlags
from dschat_ppo.errors import UserError
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.features.images.chat import PictureModel, loader_of
from dschat_ppo.features.images.flags import ImageFlags
from dschat_ppo.features.images.processors import load_processor
from dschat_ppo.models.loading import load_config
from dschat_ppo.tools.chat import main
from dschat_ppo.tools.chat_model import CheckedModel, StreamedToken

TOKENS = 5
OTHERS = ("smolvlm", "qwen2_5_vl", "gemma3")
QUESTION = "what is the colour of this picture ?"
IMAGE = {"type": "image"}
GAME = """
class Game:
    def reset(self, seed=None, options=None):
        return "Guess."

    def step(self, text):
        return "No.", 0.0, True, False, {}
"""


def text(words):
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    for family in ("qwen3_vl", "idefics3"):
        save_tiny_vlm(folder / family, family)
    write_pictures(folder)
    (folder / "no_picture.png").write_text("text")
    return folder


@pytest.fixture
def chat(folder, monkeypatch, capsys):
    """A function: a model, lines of input -> the lines of the output, without those of the log."""

    def run(family, lines, *further):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        words = ["--model", str(folder / family), "--max_tokens", str(TOKENS), "--top_k", "1"]
        assert main([*words, "--dtype", "fp32", *further]) == 0
        printed = capsys.readouterr().out.splitlines()
        return [line for line in printed if not line.startswith(("rollout: ", "images: "))]

    return run


class Oracle:
    """Greedy answers of transformers to a conversation, from the ids and the pixels of its own
    processor of images and text; placeholders are suppressed."""

    def __init__(self, folder, family):
        self.model = AutoModelForImageTextToText.from_pretrained(folder / family).eval()
        self.tokenizer = tiny_vlm_tokenizer(family)
        config = load_config(str(folder / family), "model")
        self.processor = load_processor(config, "", str(folder / family), self.tokenizer, {}, None)

    def answer(self, messages, images):
        template = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        encoded = self.processor._of_texts(
            text=[template],
            images=[images] if images else None,
            add_special_tokens=False,
            return_tensors="pt",
        )
        inputs = {name: value for name, value in encoded.items() if name != "attention_mask"}
        if "pixel_attention_mask" in encoded:
            inputs["pixel_attention_mask"] = encoded["pixel_attention_mask"]
        if "image_grid_thw" in inputs:
            ids = inputs["input_ids"]
            inputs["mm_token_type_ids"] = (ids == self.processor.image_id).int()
        banned = list(self.processor.placeholder_ids)
        with torch.no_grad():
            ids = self.model.generate(
                **inputs, max_new_tokens=TOKENS, do_sample=False, suppress_tokens=banned
            )
        response = ids[0, inputs["input_ids"].shape[1] :]
        return self.tokenizer.decode(response, skip_special_tokens=True)


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", "idefics3", *(pytest.param(name, marks=pytest.mark.release) for name in OTHERS)],
)
def test_answers_are_those_of_transformers(folder, chat, family):
    """To a picture, to two further ones after it, and to a question without one."""
    if not (folder / family).exists():
        save_tiny_vlm(folder / family, family)
    asked = []
    if family in ASKED:
        asked = ["--with_images", "True"]
    oracle = Oracle(folder, family)
    names = ("a.png", "b.png", "c.png")
    first, second, third = (Image.open(folder / name).convert("RGB") for name in names)
    lines = chat(
        family,
        [f"/image {folder}/a.png", QUESTION, f"/image '{folder}/b.png'", f"/image {folder}/c.png"]
        + ["which is big ?", "what is red ?"],
        *asked,
    )
    answers = [line for line in lines if not line.startswith(("[cut", "before the next message"))]
    messages = [{"role": "user", "content": [IMAGE, text(QUESTION)]}]
    expected = [oracle.answer(messages, [first])]
    messages.append({"role": "assistant", "content": [text(expected[0])]})
    messages.append({"role": "user", "content": [IMAGE, IMAGE, text("which is big ?")]})
    expected.append(oracle.answer(messages, [first, second, third]))
    messages.append({"role": "assistant", "content": [text(expected[1])]})
    messages.append({"role": "user", "content": [text("what is red ?")]})
    expected.append(oracle.answer(messages, [first, second, third]))
    assert [answer.strip() for answer in answers] == expected
    assert len(set(expected)) > 1
    sizes = [line.partition("<image ")[2].partition(",")[0] for line in lines if "<image" in line]
    assert sizes == ["32x32", "20x50", "64x40"]


def test_a_conversation_keeps_its_pictures(folder, chat, tmp_path):
    """Also when their file changes; and `/undo` forgets first those that wait."""
    path = tmp_path / "shot.png"
    Image.open(folder / "a.png").save(path)

    def changing():
        yield f"/image {path}"
        yield QUESTION
        Image.open(folder / "d.png").save(path)
        yield "/retry"
        yield f"/image {path}"
        yield "/undo"
        yield "/undo"
        yield f"/image {path}"
        yield QUESTION

    read = iter(changing())
    source = SimpleNamespace(isatty=lambda: False, readline=lambda *_: f"{next(read, '')}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", lambda _: source.readline().removesuffix("\n") or ended())
        lines = chat("qwen3_vl", [])
    notes = [line for line in lines if "<image" in line]
    answers = [line for line in lines if not line.startswith(("[cut", "before", "forgotten"))]
    assert answers[0] == answers[1] != answers[2]
    assert notes[2] == "forgotten: <image>"
    assert notes[3] == f"forgotten: <image>{QUESTION}"


def ended():
    raise EOFError


def test_what_cannot_be_added_is_named_with_a_way_out(folder, chat, assets):
    lines = chat(
        "qwen3_vl",
        ["/image", "/image no.png", f"/image {folder}/no_picture.png", "/image https://a.b/c.png"]
        + ["/help", "what is <|image_pad|> ?"],
    )
    assert lines[0] == "/image needs the path of a file, such as: /image picture.png"
    assert lines[1].startswith("no.png: cannot be read (No such file or directory); name the file")
    assert "no_picture.png: the image cannot be decoded" in lines[2]
    assert lines[2].endswith("name a picture, such as a PNG or JPEG file")
    assert lines[3].endswith("not fetched from the web; save it, and name the file")
    assert any(line.startswith("/image PATH  ") for line in lines)
    assert lines[-1] == (
        "a text holds '<|image_pad|>', which stands for an image to this model; write it otherwise;"
        " /image PATH puts a picture before the message"
    )
    no_template = chat("qwen3_vl", ["/image a.png"], "--apply_chat_template", "False")
    assert no_template[-1].endswith("need the chat template; omit --apply_chat_template False")
    of_text = chat("qwen3_vl", ["/image a.png"], "--compare", str(assets / "lm"))
    assert of_text[-1] == "lm sees no pictures, so none can be added to this chat"


def test_a_text_that_stands_for_a_picture_is_refused_by_who_wrote_it(folder, chat, monkeypatch):
    """It is no part of the conversation, which goes on."""
    answer = StreamedToken("<image> red")
    monkeypatch.setattr(PictureModel, "draw_tokens", lambda *given, **further: iter([answer]))
    lines = chat(
        "idefics3",
        ["what is <image> ?", "/system an <image> .", "what is red ?", "/system"]
        + ["what is red ?", "what is blue ?", "/undo", "what is red ?"],
    )
    said = "a text holds '<image>', which stands for an image to this model; "
    refused = [line.removeprefix(said) for line in lines if line.startswith(said)]
    assert refused == [
        "write it otherwise; /image PATH puts a picture before the message",
        "write the system message otherwise (/system)",
        "the model wrote it in its answer, which /undo forgets",
    ]
    assert lines.count("<image> red") == 2
    template = ["--apply_chat_template", "False"]
    assert chat("idefics3", ["what is <image> ?"], *template)[-1].startswith(said)


def test_models_of_text_have_no_such_command(assets, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("/image a.png\n/help\n"))
    assert main(["--model", str(assets / "lm"), "--dtype", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert "there is no command /image; /help lists them" in printed
    assert "/image PATH" not in printed


def test_flags_that_do_not_go_with_the_model_are_refused(assets, folder, tmp_path, capsys):
    words = ["--model", str(assets / "lm"), "--with_images", "True"]
    assert main(words) == 2
    assert "--with_images True: --model" in capsys.readouterr().err
    vlm = str(folder / "qwen3_vl")
    checked = CheckedModel(vlm, "qwen3_vl", "--model", vlm, tiny_vlm_tokenizer("qwen3_vl"))
    features = FeatureFlags((EnvironmentFlags(tools=["a.py:f"]), ImageFlags()))
    said = f"--model {vlm}: sees pictures, which do not go with --%s in a chat yet; omit --%s, or"
    with ExitStack() as at_end, pytest.raises(UserError, match=said % ("tools", "tools")):
        loader_of(features, [checked], at_end)
    both = "--environment and --tools"
    features = FeatureFlags((EnvironmentFlags("b.py:g", tools=["a.py:f"]), ImageFlags()))
    with ExitStack() as at_end, pytest.raises(UserError, match=f"{both} .*; omit {both}, or"):
        loader_of(features, [checked], at_end)
    (tmp_path / "game.py").write_text(GAME)
    capsys.readouterr()
    words = ["--model", vlm, "--dtype", "fp32", "--environment", f"{tmp_path / 'game.py'}:Game"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"error: {said}" % ("environment", "environment") in error
    assert error.count("error: ") == 1
    assert main(["--model", "x", "--image_folder", "y"]) == 2
    assert "where /image PATH adds a picture" in capsys.readouterr().err
