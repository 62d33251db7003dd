"""Model folders: what one must be, downloads from a local server that speaks the hub's protocol,
settings and shapes; malformed ones, and traps that leave a mark if anything of a folder is run or
fetched."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copytree

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import CodeGenConfig, CodeGenForCausalLM

from dschat_ppo.errors import UserError
from dschat_ppo.models import model_folders
from dschat_ppo.models.adapters.folders import adapter_weights
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_sequence_classifier,
    load_causal_lm,
    load_config,
)
from dschat_ppo.models.model_folders import OF_A_RUN, files_to_download, model_folder, settings_only
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.vocabulary import check_vocabulary
from dschat_ppo.models.weight_headers import checkpoint_shapes, is_old_buffer, weight_files


def test_the_output_folder_of_step_3_names_the_models_inside(tmp_path):
    for role in ("critic", "actor", "logs"):
        (tmp_path / role).mkdir()
    for role in ("critic", "actor"):
        (tmp_path / role / "config.json").write_text("{}")
    meant = f"did you mean {tmp_path}/actor or {tmp_path}/critic?"
    with pytest.raises(
        UserError,
        match=f"^--model {tmp_path}: the folder has no config.json, .*; {re.escape(meant)}$",
    ):
        model_folder(str(tmp_path), "--model")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("out/stf", "no such folder; did you mean {}/out/sft?"),
        ("uot/sft", "no such folder; did you mean {}/out?"),
        ("somewhere/else", "no such folder"),
    ],
)
def test_a_missing_folder_is_answered_with_the_nearest_one(tmp_path, name, end):
    (tmp_path / "out/sft").mkdir(parents=True)
    with pytest.raises(UserError) as problem:
        model_folder(str(tmp_path / name), "--model")
    assert str(problem.value) == f"--model {tmp_path / name}: {end.format(tmp_path)}"


def test_a_name_that_may_be_of_the_hub_is_answered_too(tmp_path, monkeypatch):
    (tmp_path / "out/sft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"^--model out/stf: neither a local folder .*; did you mean out/sft\?$"
    ):
        model_folder("out/stf", "--model")
    with pytest.raises(
        UserError, match=r"--critic some/mo\^del: neither .* Repo id must use alphanumeric"
    ):
        model_folder("some/mo^del", "--critic")


COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_FORMATS = (
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "training_args.bin",
    "README.md",
    "tf_model.h5",
)


def test_settings_are_all_that_a_dry_run_needs_of_a_model_but_not_of_an_adapter():
    model = ["config.json", "tokenizer.json", "model.safetensors", "adapter_model.safetensors"]
    assert model_folders.files_to_download(model, weights=False) == [
        "config.json",
        "tokenizer.json",
    ]
    for weights in ("adapter_model.safetensors", "adapter_model.bin"):
        assert model_folders.files_to_download(["adapter_config.json", weights], weights=False)[
            1:
        ] == [weights]


@pytest.mark.parametrize(
    ("weights", "others"),
    [
        (["model.safetensors"], OTHER_FORMATS),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], OTHER_FORMATS),
        (
            ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
            ("flax.msgpack",),
        ),
        (["pytorch_model.bin"], ("optimizer.bin", "README.md")),
        (["weights.safetensors"], ("training_args.bin",)),
    ],
    ids=lambda value: value[0],
)
def test_weights_are_wanted_in_one_format(weights, others):
    settings = [
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    ]
    assert sorted(files_to_download([*others, *settings, *weights, "eval/config.json"])) == sorted(
        settings + weights
    )


class Hub(BaseHTTPRequestHandler):
    """The three requests of a download."""

    files: dict[str, bytes]
    fetched: list[str]

    def log_message(self, *words):
        """No log."""

    def answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0].strip("/")
        # the same model, of which a dry run fetches a part
        path = path.replace("some/dry", "some/model")
        if path.startswith("api/models/some/model/tree/"):
            entries = [
                {"type": "file", "path": n, "size": len(b), "oid": "0" * 40}
                for n, b in self.files.items()
            ]
            self.answer(json.dumps(entries).encode(), Content_Type="application/json")
        elif path.startswith("api/models/some/model"):
            about = {
                "id": "some/model",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in self.files],
            }
            self.answer(json.dumps(about).encode(), Content_Type="application/json")
        elif path.startswith(f"some/model/resolve/{COMMIT}/"):
            name = path.removeprefix(f"some/model/resolve/{COMMIT}/")
            if self.command == "GET":
                self.fetched.append(name)
            self.answer(self.files[name], ETag=f'"{name}"', X_Repo_Commit=COMMIT)
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815  the name that http.server calls


@pytest.fixture
def hub():
    kind = type(
        "ThisHub",
        (Hub,),
        {"files": {"config.json": b"{}", "model.safetensors": b"safe"}, "fetched": []},
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield kind, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def download(address: str, *names: str) -> list[str]:
    """The folders, or the messages, of `model_folder` with this hub; "dry NAME": for a dry run."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        for word in names:
            with settings_only() if word.startswith("dry ") else nullcontext():
                try:
                    found.append(model_folder(word.removeprefix("dry "), "--model_name_or_path"))
                except UserError as problem:
                    found.append(str(problem))
    return found


def test_a_download_fetches_one_format_and_is_used_again_without_network(
    hub, tmp_path, monkeypatch
):
    for name, value in {
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    kind, address = hub
    kind.files |= dict.fromkeys(OTHER_FORMATS, b"unwanted")
    names = ("some/model", "some/model", "some/other", "dry some/dry")
    folder, again, missing, settings_alone = download(address, *names)
    assert (
        sorted(kind.fetched) == ["config.json", "config.json", "model.safetensors"]
        and again == folder
    )
    with open(f"{folder}/model.safetensors", "rb") as file:
        assert file.read() == b"safe"
    assert (
        missing.startswith("--model_name_or_path some/other: neither a local folder nor")
        and "404" in missing
    )
    assert sorted(os.listdir(settings_alone)) == ["config.json"]
    names = ("some/model", "some/third", "dry some/dry", "some/dry")
    without_network, unreachable, dry, whole = download("http://127.0.0.1:9", *names)
    assert (without_network, dry) == (folder, settings_alone)
    assert "was not downloaded before, and the hub cannot be reached" in unreachable
    assert "was not downloaded before" in whole, "a run needs the weights"


FLAG = "--model_name_or_path"
CONTENTS = {
    "zeros": b"\0" * 5000,
    "nothing": b"",
    "null": b"null",
    "a list": b"[1, 2]",
    "text": b'"abc"',
    "nested 5,000 deep": b"[" * 5000 + b"]" * 5000,
    "no UTF-8": b'{"a": "\xff\xfe"}',
}


def is_refused(read, folder: Path) -> bool:
    """Whether reading is rejected in one line that names the file; any other exception fails the
    test."""
    try:
        read(folder)
    except UserError as problem:
        assert str(folder) in str(problem)
        assert "\n" not in str(problem) and len(str(problem)) < 1500
        return True
    return False


def read_model(folder: Path) -> None:
    config, tokenizer = load_config(str(folder), FLAG), load_tokenizer(str(folder), FLAG)
    check_vocabulary(tokenizer, config, FLAG, str(folder))
    check_causal_lm(str(folder))


@pytest.fixture
def model(assets, tmp_path) -> Path:
    return Path(shutil.copytree(assets / "lm", tmp_path / "model"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_malformed_config_files_are_rejected(model, name):
    whole = (model / name).read_bytes()
    for content in (*CONTENTS.values(), whole[: len(whole) // 2]):
        (model / name).write_bytes(content)
        assert is_refused(read_model, model), content[:20]


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (
            "lm",
            {"vocab_size": 4 * 10**7, "hidden_size": 2**18},
            "wrong shape",
        ),  # ten trillion, before they take memory
        ("lm", {"num_hidden_layers": 10_001}, "'num_hidden_layers' is above 10000"),
        ("lm", {"num_key_value_heads": 0}, "LlamaConfig"),
        ("lm", {"hidden_act": "nonsense"}, "LlamaConfig.*nonsense"),
        ("lm", {"text_config": 7}, "vocab_size"),
        ("reward", {"hidden_act": "nonsense"}, "nonsense"),
        ("reward", {"vocab_size": -1}, "negative dimension"),
        ("codegen", {"n_head": 0}, "by zero"),
    ],
)
def test_a_model_that_cannot_be_built_is_rejected_in_one_line(
    assets, tmp_path, kind, settings, words
):
    """Language models; reward models; those that transformers has no classifier for."""
    folder = tmp_path / "model"
    if kind == "codegen":
        sizes = {
            "vocab_size": 60,
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
        }
        CodeGenForCausalLM(CodeGenConfig(**sizes)).save_pretrained(folder)
    else:
        shutil.copytree(assets / kind, folder)
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | settings))
    words = (
        words if kind == "lm" else f"no reward model can be built from its config.json: .*{words}"
    )
    with pytest.raises(UserError, match=words) as caught:
        (
            read_model(folder)
            if kind == "lm"
            else check_sequence_classifier(str(folder), new_head=True)
        )
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_flipped_bytes_of_weights_are_rejected_or_read(model):
    rng, whole = random.Random(0), (model / "model.safetensors").read_bytes()
    for _ in range(30):
        damaged = bytearray(whole)
        # the header; damaged numbers cannot be detected
        damaged[rng.randrange(400)] ^= rng.randrange(1, 256)
        (model / "model.safetensors").write_bytes(damaged)
        is_refused(read_model, model)
    (model / "model.safetensors").write_bytes(whole[:-1])
    assert is_refused(read_model, model)


KERNEL = "some-org/some-kernel"
TRAP = """\
import os
class Anything:
    def __init__(self, *a, **k): pass
    def __call__(self, *a, **k): return Anything()
    def __getattr__(self, name): return Anything()
def get_kernel(*a, **k):
    open(os.environ["MARK"], "a").write(f"fetched {a}\\n")
    raise RuntimeError("the kernel was fetched")
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return (lambda *a, **k: lambda decorated: decorated) if name.startswith("use_") else Anything()
"""
CODE = (
    "import os\nopen(os.environ['MARK'], 'a').write('was run\\n')\nclass Own: pass\ndef"
    " generate(model): pass\n"
)
MAP = {
    "AutoConfig": "own.Own",
    "AutoModelForCausalLM": "own.Own",
    "AutoTokenizer": ["own.Own", None],
}
# The kinds of traps: settings of config.json, and other files of the folder.
TRAPS = {
    "attention": (
        {"attn_implementation": KERNEL, "auto_map": MAP},
        {"own.py": CODE, "custom_generate/generate.py": CODE},
    ),
    "inner attention": (
        {
            "_attn_implementation": KERNEL,
            "_attn_implementation_internal": KERNEL,
            "experts_implementation": KERNEL,
            "auto_map": {"AutoModelForCausalLM": "some-org/some-model--own.Own"},
            "custom_generate": KERNEL,
        },
        {"generation_config.json": json.dumps({"custom_generate": KERNEL})},
    ),
}
LOADS = """\
import os, sys, transformers
from pathlib import Path
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.tokenizers import load_tokenizer
mark = Path(os.environ["MARK"])
for folder in sys.argv[2:]:
    load_tokenizer(folder, "--model")
    model = load_causal_lm(folder, "fp32", None)
    load_sequence_classifier(folder, "fp32", None, new_head=True)
    model.save_pretrained(folder + " saved")
    assert not mark.exists(), folder + ": " + mark.read_text()
try:  # the trap itself works: transformers alone falls into it
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
except (RuntimeError, ValueError):
    pass
print(mark.read_text())
"""


def changed(assets, folder, settings, files=None):
    """A copy of the language model with these settings and files."""
    copytree(assets / "lm", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
def test_no_trap_of_a_folder_runs_where_kernels_is_installed(assets, tmp_path):
    package, about = tmp_path / "path" / "kernels", tmp_path / "path" / "kernels-0.18.2.dist-info"
    for folder, name, text in (
        (package, "__init__.py", TRAP),
        (about, "METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"),
        (about, "top_level.txt", "kernels\n"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    folders = [str(changed(assets, tmp_path / name, *trap)) for name, trap in TRAPS.items()]
    paths = [str(package.parent), str(Path(__file__).parents[2])]
    environment = os.environ | {
        "MARK": str(tmp_path / "mark"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    run = subprocess.run(
        [sys.executable, "-c", LOADS, folders[0], *folders],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert f"fetched ('{KERNEL}'," in run.stdout  # by transformers alone
    ignored = [line for line in run.stdout.splitlines() if "does not choose code" in line]
    assert len(ignored) == 2  # one for each folder
    for folder, line, (settings, _) in zip(folders, ignored, TRAPS.values(), strict=True):
        named = set(line.split(" in config.json")[0].split(f"{folder}: ")[1].split(", "))
        assert named == settings.keys() - {"_attn_implementation_internal"}
        saved = json.loads((Path(folder + " saved") / "config.json").read_text())
        assert not {name.strip("_") for name in saved} & {name.strip("_") for name in settings}, (
            folder
        )


def test_settings_of_nested_configurations_are_ignored_too(assets, tmp_path):
    from transformers import Gemma3Config, Gemma3TextConfig

    text = Gemma3TextConfig(
        vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    Gemma3Config(text_config=text.to_dict()).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["text_config"] |= {"attn_implementation": KERNEL, "auto_map": MAP}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = load_config(str(tmp_path), "--model")
    assert config.text_config._attn_implementation is None
    assert not hasattr(config.text_config, "auto_map")


def test_settings_of_another_run_are_those_of_this_one_with_a_note(assets, tmp_path, said):
    """Checkpointing that no flag asks for breaks PPO's updates, and attention weights a rollout."""
    # how it is built
    built = {"distributed_config": {"tp_size": 2}, "fusion_config": {"patch_embeddings": True}}
    folder = changed(
        assets, tmp_path / "lm", {**built, **{name: not value for name, value in OF_A_RUN.items()}}
    )
    model = load_causal_lm(str(folder), "fp32", None)
    model.save_pretrained(tmp_path / "saved")
    assert not built.keys() & json.loads((tmp_path / "saved" / "config.json").read_text()).keys()
    assert not model.is_gradient_checkpointing
    assert {
        name: getattr(model.config, name, value) for name, value in OF_A_RUN.items()
    } == OF_A_RUN
    assert all(any(name in line for line in said if str(folder) in line) for name in OF_A_RUN)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing, "by the flag"


def test_quantised_weights_are_refused(assets, tmp_path):
    folder = changed(assets, tmp_path / "lm", {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(
        UserError, match="its weights are quantised .*method gptq.*unquantised weights"
    ):
        load_causal_lm(str(folder), "fp32", None)


def test_names_and_shapes_come_from_all_files_of_one_format(tmp_path):
    torch.save({"c": torch.zeros(4)}, tmp_path / "pytorch_model.bin")
    torch.save({"optimizer": torch.zeros(4)}, tmp_path / "optimizer.bin")
    assert checkpoint_shapes(str(tmp_path)) == {"c": (4,)}
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(())}, tmp_path / "model-2.safetensors")
    assert [file.name for file in weight_files(str(tmp_path))] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    assert checkpoint_shapes(str(tmp_path)) == {"a": (2, 3), "b": ()}


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="model.safetensors: cannot be read, copy the model again"):
        checkpoint_shapes(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("h.0.attn.bias", (1, 1, 8, 8), True),
        ("h.0.attn.bias", (1, 1, 8, 4), False),
        ("layers.0.attention.masked_bias", (), True),
        ("layers.0.attention.masked_bias", (3,), False),
        ("layers.0.self_attn.rotary_emb.inv_freq", (4,), True),
        ("layers.0.self_attn.rotary_emb.inv_freq", (4, 4), False),
        ("layers.0.self_attn.q_proj.bias", (1, 1, 8, 8), False),
    ],
)
def test_old_buffers_have_known_names_and_shapes(name, shape, expected):
    assert is_old_buffer(name, shape) is expected


class LeavesAMark:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_a_pickle_with_code_is_refused_in_one_line_and_does_not_run(assets, tmp_path):
    def load(folder):
        check_causal_lm(folder)
        check_sequence_classifier(folder, new_head=True)

    copytree(assets / "lm", tmp_path / "lm")
    weights = load_file(tmp_path / "lm" / "model.safetensors")
    (tmp_path / "lm" / "model.safetensors").unlink()
    file = tmp_path / "lm" / "pytorch_model.bin"
    torch.save({**weights, "more": LeavesAMark(str(tmp_path / "mark"))}, file)
    message = (
        rf"{file}: holds more than weights \(it calls"
        rf" posix.mkdir\).*save_file\(torch.load\('{file}'"
    )
    with pytest.raises(UserError, match=message) as caught:
        load(str(tmp_path / "lm"))
    assert "\n" not in str(caught.value) and "PyTorch 2.6" not in str(caught.value)
    torch.save([1, 2], file)
    with pytest.raises(UserError, match="must hold tensors by name"):
        load(str(tmp_path / "lm"))
    assert not (tmp_path / "mark").exists()
    torch.save(weights, file)
    load(str(tmp_path / "lm"))


def test_an_old_adapter_with_code_is_refused_too(tmp_path):
    torch.save({"more": LeavesAMark(str(tmp_path / "mark"))}, tmp_path / "adapter_model.bin")
    with pytest.raises(UserError, match="adapter_model.bin: holds more than weights"):
        adapter_weights(str(tmp_path))
    assert not (tmp_path / "mark").exists()
