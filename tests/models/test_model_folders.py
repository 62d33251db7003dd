"""What a folder must be to be taken for a model, and downloads from a local server that speaks the hub's protocol."""

import json
import os
import re
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from dschat_ppo.errors import UserError
from dschat_ppo.models import model_folders
from dschat_ppo.models.model_folders import model_folder, settings_only, wanted_files


def test_the_output_folder_of_step_3_names_the_models_inside(tmp_path):
    for role in ("critic", "actor", "logs"):
        (tmp_path / role).mkdir()
    for role in ("critic", "actor"):
        (tmp_path / role / "config.json").write_text("{}")
    meant = f"did you mean {tmp_path}/actor or {tmp_path}/critic?"
    with pytest.raises(UserError, match=f"^--model {tmp_path}: the folder has no config.json, .*; {re.escape(meant)}$"):
        model_folder(str(tmp_path), "--model")


@pytest.mark.parametrize(("name", "end"), [
    ("out/stf", "no such folder; did you mean {}/out/sft?"), ("uot/sft", "no such folder; did you mean {}/out/sft?"),
    ("somewhere/else", "no such folder"),
])  # fmt: skip
def test_a_missing_folder_is_answered_with_the_nearest_one(tmp_path, name, end):
    (tmp_path / "out/sft").mkdir(parents=True)
    with pytest.raises(UserError) as problem:
        model_folder(str(tmp_path / name), "--model")
    assert str(problem.value) == f"--model {tmp_path / name}: {end.format(tmp_path)}"


def test_a_name_that_may_be_of_the_hub_is_answered_too(tmp_path, monkeypatch):
    (tmp_path / "out/sft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^--model out/stf: neither a local folder .*; did you mean out/sft\?$"):
        model_folder("out/stf", "--model")
    with pytest.raises(UserError, match=r"--critic some/mo\^del: neither .* Repo id must use alphanumeric"):
        model_folder("some/mo^del", "--critic")


COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_FORMATS = ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "onnx/model.onnx",
                 "training_args.bin", "README.md", "tf_model.h5")  # fmt: skip


def test_settings_are_all_that_a_dry_run_needs_of_a_model_but_not_of_an_adapter():
    model = ["config.json", "tokenizer.json", "model.safetensors", "adapter_model.safetensors"]
    assert model_folders.wanted_files(model, weights=False) == ["config.json", "tokenizer.json"]
    for weights in ("adapter_model.safetensors", "adapter_model.bin"):
        assert model_folders.wanted_files(["adapter_config.json", weights], weights=False)[1:] == [weights]


@pytest.mark.parametrize(("weights", "others"), [
    (["model.safetensors"], OTHER_FORMATS),
    (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], OTHER_FORMATS),
    (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], ("flax.msgpack",)),
    (["pytorch_model.bin"], ("optimizer.bin", "README.md")), (["weights.safetensors"], ("training_args.bin",)),
], ids=lambda value: value[0])  # fmt: skip
def test_weights_are_wanted_in_one_format(weights, others):
    settings = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    assert sorted(wanted_files([*others, *settings, *weights, "eval/config.json"])) == sorted(settings + weights)


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
        path = path.replace("some/dry", "some/model")  # the same model, of which a dry run fetches a part
        if path.startswith("api/models/some/model/tree/"):
            entries = [{"type": "file", "path": n, "size": len(b), "oid": "0" * 40} for n, b in self.files.items()]
            self.answer(json.dumps(entries).encode(), Content_Type="application/json")
        elif path.startswith("api/models/some/model"):
            about = {"id": "some/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
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
    kind = type("ThisHub", (Hub,), {"files": {"config.json": b"{}", "model.safetensors": b"safe"}, "fetched": []})
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
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
        for word in names:
            with settings_only() if word.startswith("dry ") else nullcontext():
                try:
                    found.append(model_folder(word.removeprefix("dry "), "--model_name_or_path"))
                except UserError as problem:
                    found.append(str(problem))
    return found


def test_a_download_fetches_one_format_and_is_used_again_without_network(hub, tmp_path, monkeypatch):
    for name, value in {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    kind, address = hub
    kind.files |= dict.fromkeys(OTHER_FORMATS, b"unwanted")
    names = ("some/model", "some/model", "some/other", "dry some/dry")
    folder, again, missing, settings_alone = download(address, *names)
    assert sorted(kind.fetched) == ["config.json", "config.json", "model.safetensors"] and again == folder
    with open(f"{folder}/model.safetensors", "rb") as file:
        assert file.read() == b"safe"
    assert missing.startswith("--model_name_or_path some/other: neither a local folder nor") and "404" in missing
    assert sorted(os.listdir(settings_alone)) == ["config.json"]
    names = ("some/model", "some/third", "dry some/dry", "some/dry")
    without_network, unreachable, dry, whole = download("http://127.0.0.1:9", *names)
    assert (without_network, dry) == (folder, settings_alone)
    assert "was not downloaded before, and the hub cannot be reached" in unreachable
    assert "was not downloaded before" in whole, "a run needs the weights"
