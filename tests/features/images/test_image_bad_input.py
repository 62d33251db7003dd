"""Command lines of step 3 that are wrong about images: one message each, before a model is
loaded."""

import json
import shutil

import pytest
from features.images.image_runs import flags_of_prompts, write_pictures, write_rows
from launch import forked
from tiny_models import new_model
from tiny_vlms import save_tiny_vlm, tiny_vlm_tokenizer
from transformers import AutoConfig, LlamaForSequenceClassification

pytestmark = pytest.mark.release

FUNCTION = ["--use_reward_model", "False", "--reward_function", "exact_match"]
FUNCTION += ["--advantage_estimator", "grpo", "--n_samples_per_prompt", "4"]
REWARD = ["--critic_model_name_or_path", "{folder}/reward"]
# (actor, data file, further words, what is said)
CASES = {
    "a reward model of text": (
        "vlm",
        "rows",
        REWARD,
        ["--critic_model_name_or_path", "LlamaConfig reads text alone", "--reward_model_sources"],
    ),
    "a column that is not there": (
        "vlm",
        "rows",
        [*FUNCTION, "--image_column", "picture"],
        ["--image_column picture: no data set has", "rows.jsonl has 'image', 'prompt', 'answer'"],
    ),
    "a column that texts do not have": (
        "vlm",
        "texts",
        [*FUNCTION, "--image_column", "image"],
        ["--image_column image: no data set has", "texts.jsonl has 'prompt', 'answer'"],
    ),
    "a model without processor": (
        "bare",
        "rows",
        FUNCTION,
        ["bare", "has no processor of images (preprocessor_config.json)"],
    ),
    "images for a model of text": (
        "text",
        "rows",
        FUNCTION,
        ["rows.jsonl", "'image' holds content, 'a.png'", "--ignore_columns image"],
    ),
    "a column of images for a model of text": (
        "text",
        "rows",
        [*FUNCTION, "--image_column", "image"],
        ["--image_column image", "LlamaConfig sees no images", "take another model"],
    ),
    "parts for a model of text": (
        "text",
        "parts",
        FUNCTION,
        ["parts.jsonl, row 1", "a part of type 'image'; only text parts can be used"],
    ),
    "a model of text that is asked to see": (
        "text",
        "texts",
        [*FUNCTION, "--with_images", "True"],
        ["--with_images True", "LlamaConfig sees no images"],
    ),
    "images that are not asked for": (
        "text_too",
        "rows",
        [*FUNCTION, "--image_column", "image", "--with_images", "False"],
        ["--image_column image", "add --with_images True"],
    ),
    "a file that is missing": (
        "vlm",
        "missing",
        FUNCTION,
        ["missing.jsonl, row 1", "'no.png' cannot be read", "--image_folder"],
    ),
    "a setting that the processor does not have": (
        "vlm",
        "rows",
        [*FUNCTION, "--image_options", "siz=3"],
        ["--image_options siz", "has no such setting", "patch_size"],
    ),
    "an agent": (
        "vlm",
        "rows",
        [*FUNCTION[:2], *FUNCTION[4:], "--agent", "agents.py:play"],
        ["Qwen3VLConfig sees images", "--agent"],
    ),
    "images alone beyond the limit": (
        "vlm",
        "rows",
        [*FUNCTION, "--max_prompt_seq_len", "10"],
        ["rows.jsonl", "--max_prompt_seq_len 10"],
    ),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Case -> [exit code, the lines of output from `error:` on]."""
    folder = tmp_path_factory.mktemp("bad")
    write_pictures(folder)
    question = {"prompt": "what is this ?", "answer": "red"}
    write_rows(folder, [{"image": "a.png", **question}])
    part = {"type": "image", "image": "a.png"}
    message = {"role": "user", "content": [part, {"type": "text", "text": "what ?"}]}
    files = {
        "texts": question,
        "missing": {"image": "no.png", **question},
        "parts": {"prompt": [message], "answer": "red"},
    }
    for name, row in files.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    vlm = save_tiny_vlm(folder / "vlm", "qwen3_vl")
    save_tiny_vlm(folder / "text_too", "qwen3_5")
    shutil.copytree(vlm, folder / "bare")
    for file in (folder / "bare").glob("*processor*"):
        file.unlink()
    tokenizer = tiny_vlm_tokenizer("qwen3_vl")
    new_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "text")
    config = AutoConfig.from_pretrained(folder / "text")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    for name in ("text", "reward"):
        tokenizer.save_pretrained(folder / name)
    cases = {}
    for index, (name, (actor, data, words, _)) in enumerate(CASES.items()):
        given = flags_of_prompts(folder / actor, folder / f"{data}.jsonl")
        given += ["--max_prompt_seq_len", "64", "--max_answer_seq_len", "4"]
        given += [word.format(folder=folder) for word in words]
        cases[name] = ["ppo", [*given, "--output_dir", str(folder / str(index))]]
    (folder / "cases.json").write_text(json.dumps(cases))
    worker = "tests/workers/bad_input.py"
    ended = forked(1, worker, folder / "cases.json", folder / "said.json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_wrong_words_about_images_give_one_message(said, name):
    code, lines = said[name]
    assert code == 2
    assert len(lines) == 1
    for word in CASES[name][3]:
        assert word in lines[0]
