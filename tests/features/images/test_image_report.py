"""What people see of images: their sizes in logs and samples, and small pictures in the report."""

import base64
import hashlib
import io
import json
import re
from dataclasses import replace

import pytest
import torch
from features.images.image_runs import (
    prepared,
    prepared_prompts,
    source_of,
    write_pictures,
    write_rows,
)
from PIL import Image
from tiny_vlms import noise, save_tiny_vlm

from dschat_ppo.data.prompt_contents import prompt_content, readable_prompts, unpadded_ids
from dschat_ppo.features.images.image_files import ImageFile
from dschat_ppo.html_report.page import write_report
from dschat_ppo.ppo.rollouts import prompt_batch
from dschat_ppo.ppo.samples import contents_of
from dschat_ppo.run.start_and_end import log_samples, row_sample

ROWS = [
    {"image": "a.png", "prompt": "what is this ?", "response": "red"},
    {"image": ["b.png", "c.png"], "prompt": "first <image> second <image> ?", "response": "one"},
    {"image": None, "prompt": "what is red ?", "response": "a colour"},
]
SIZES = {  # of the images of the first two rows, by the family's own processor
    "qwen3_vl": ["<image 32x32, 16 tokens>", "<image 20x50, 12 tokens>", "<image 64x40, 15 tokens>"]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    for family in SIZES:
        save_tiny_vlm(folder / family, family)
    write_pictures(folder)
    return folder


def test_samples_have_the_size_of_an_image_in_place_of_its_tokens(folder):
    vlm = str(folder / "qwen3_vl")
    prompts, config, tokenizer = prepared_prompts(vlm, write_rows(folder, ROWS))
    source = source_of(config, vlm, tokenizer, torch.device("cpu"))
    # the responses to a prompt, as a run has them
    batch = prompt_batch(prompts, [1, 1, 2, 0], 0, source)
    contents = contents_of(batch, source)
    texts = readable_prompts(tokenizer, unpadded_ids(batch.prompt_ids, batch.prompt_mask), contents)
    first, second, third = SIZES["qwen3_vl"]
    assert texts[0] == texts[1] == f"user : first{second}second{third}? assistant :"
    assert texts[2] == "user : what is red ? assistant :"
    assert texts[3].startswith(f"user :{first}what is this")
    assert contents[2].record == {}
    [written] = contents[3].record["images"]
    file = ImageFile(written["path"], written["sha256"])
    assert file.content() == (folder / "a.png").read_bytes()
    assert prompt_content(prompts[0]).record == contents[3].record


def test_the_log_has_neither_placeholders_nor_base64(folder, caplog):
    vlm = str(folder / "qwen3_vl")
    rows, _, tokenizer = prepared(vlm, write_rows(folder, ROWS))
    texts = [row_sample(tokenizer, row) for row in rows]
    assert all("image_pad" not in text for text in texts)
    assert sum(text.count(size) for text in texts for size in SIZES["qwen3_vl"]) == 3
    assert all("⟦" in text for text in texts)
    url = base64.b64encode((folder / "a.png").read_bytes()).decode()
    row = {"image": f"data:image/png;base64,{url}", "prompt": "what is this ?"}
    prompts, *_ = prepared_prompts(vlm, write_rows(folder, [row]))
    with caplog.at_level("INFO"):
        log_samples(tokenizer, prompts, ["rows"])
    assert url[:40] not in caplog.text
    assert f"data:image/png;base64,<{len(url)} characters of base64>" in caplog.text


def test_the_log_counts_the_images_of_each_part_of_the_rows(folder, capsys):
    rows = [{**ROWS[0], "response": word} for word in ("red", "blue", "green")] + [ROWS[2]]
    prepared(str(folder / "qwen3_vl"), write_rows(folder, rows), "--eval_fraction", "0.5")
    counts = re.findall(r"(\d+) rows? with images", capsys.readouterr().out)
    assert len(counts) == 2 and sum(map(int, counts)) == 3


def run_folder(folder, lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward/score_mean": 0.5}\n')
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def sample(file, step=1, prompt="what is this ?"):
    line = {"step": step, "prompt": prompt, "answer": "red", "tokens": 9, "score": 1.0}
    line |= {"scores": {"rule": 1.0}, "kl": 0.0, "length": 1, "ended": "eos"}
    reference = {"path": str(file.path), "sha256": file.sha}
    return {**line, "content": {"images": [reference]}}


def file_of(path, image):
    """The file of a picture, which is written."""
    image.save(path)
    return ImageFile(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def pictures_in(path):
    texts = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', path.read_text())
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in texts]


def test_the_report_holds_small_pictures(tmp_path):
    large = file_of(tmp_path / "<b>.png", noise(300, 150, 1))
    changed = file_of(tmp_path / "changed.png", noise(32, 32, 2))
    gone = replace(large, path=str(tmp_path / "gone.png"))
    noise(32, 32, 3).save(tmp_path / "changed.png")
    damaged = {**sample(large), "content": {"images": [{"path": 3}]}}
    run = run_folder(tmp_path / "run", [sample(large), sample(changed), sample(gone), damaged])
    write_report([run], tmp_path / "report.html")
    [picture] = pictures_in(tmp_path / "report.html")
    assert picture.size == (96, 48) and picture.format == "JPEG"
    page = (tmp_path / "report.html").read_text()
    assert "changed.png is no longer there" in page and "gone.png is no longer there" in page
    assert 'alt="&lt;b&gt;.png"' in page and "<b>.png" not in page
    assert "img-src data:;" in page


def test_a_page_has_forty_pictures_the_newest_samples_first(tmp_path):
    files = [file_of(tmp_path / f"{index}.png", noise(8, 8, index)) for index in range(50)]
    lines = [sample(file, step) for step, file in enumerate(files, start=1)]
    write_report([run_folder(tmp_path / "run", lines)], tmp_path / "report.html")
    assert len(pictures_in(tmp_path / "report.html")) == 20  # of the steps that are shown
    lines = [sample(file, step=1 + index // 25) for index, file in enumerate(files)]
    write_report([run_folder(tmp_path / "second", lines)], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert len(pictures_in(tmp_path / "report.html")) == 40
    assert 'title="49.png"' in page and 'title="24.png"' not in page


def test_prompts_with_one_text_and_two_pictures_are_two(tmp_path):
    run = run_folder(tmp_path / "run", [])
    (run / "eval").mkdir()
    files = [file_of(tmp_path / f"{index}.png", noise(8, 8, index)) for index in range(2)]
    lines = []
    for file in files:
        line = {"index": 0, "prompt": "what is this ?", "answers": ["red"], "scores": [1.0]}
        line |= {"lengths": [1], "ended": ["eos"], "kl": None}
        lines.append(json.dumps({**line, "content": sample(file)["content"]}) + "\n")
    (run / "eval/step_000001.jsonl").write_text("".join(lines))
    write_report([run], tmp_path / "report.html")
    assert len(pictures_in(tmp_path / "report.html")) == 2
    assert (tmp_path / "report.html").read_text().count('data-key="prompt what is this ?"') == 2
