"""A model folder names no code: traps that leave a mark if anything of a folder is run or fetched."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest

from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import load_causal_lm, load_config
from dschat_ppo.models.model_folders import OF_A_RUN

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
CODE = "import os\nopen(os.environ['MARK'], 'a').write('was run\\n')\nclass Own: pass\ndef generate(model): pass\n"
MAP = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}
# The kinds of traps: settings of config.json, and other files of the folder.
TRAPS = {
    "attention": ({"attn_implementation": KERNEL, "auto_map": MAP},
                  {"own.py": CODE, "custom_generate/generate.py": CODE}),
    "inner attention": (
        {"_attn_implementation": KERNEL, "_attn_implementation_internal": KERNEL, "experts_implementation": KERNEL,
         "auto_map": {"AutoModelForCausalLM": "some-org/some-model--own.Own"}, "custom_generate": KERNEL},
        {"generation_config.json": json.dumps({"custom_generate": KERNEL})},
    ),
}  # fmt: skip
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
        (package, "__init__.py", TRAP), (about, "METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"),
        (about, "top_level.txt", "kernels\n"),
    ):  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    folders = [str(changed(assets, tmp_path / name, *trap)) for name, trap in TRAPS.items()]
    paths = [str(package.parent), str(Path(__file__).parents[2])]
    environment = os.environ | {"MARK": str(tmp_path / "mark"), "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run(
        [sys.executable, "-c", LOADS, folders[0], *folders], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert f"fetched ('{KERNEL}'," in run.stdout  # by transformers alone
    ignored = [line for line in run.stdout.splitlines() if "does not choose code" in line]
    assert len(ignored) == 2  # one for each folder
    for folder, line, (settings, _) in zip(folders, ignored, TRAPS.values(), strict=True):
        named = set(line.split(" in config.json")[0].split(f"{folder}: ")[1].split(", "))
        assert named == settings.keys() - {"_attn_implementation_internal"}
        saved = json.loads((Path(folder + " saved") / "config.json").read_text())
        assert not {name.strip("_") for name in saved} & {name.strip("_") for name in settings}, folder


def test_settings_of_nested_configurations_are_ignored_too(assets, tmp_path):
    from transformers import Gemma3Config, Gemma3TextConfig

    text = Gemma3TextConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    Gemma3Config(text_config=text.to_dict()).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["text_config"] |= {"attn_implementation": KERNEL, "auto_map": MAP}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = load_config(str(tmp_path), "--model")
    assert config.text_config._attn_implementation is None
    assert not hasattr(config.text_config, "auto_map")


def test_settings_of_another_run_are_those_of_this_one_with_a_note(assets, tmp_path, said):
    """Checkpointing that no flag asks for breaks PPO's updates, and attention weights a rollout."""
    built = {"distributed_config": {"tp_size": 2}, "fusion_config": {"patch_embeddings": True}}  # how it is built
    folder = changed(assets, tmp_path / "lm", {**built, **{name: not value for name, value in OF_A_RUN.items()}})
    model = load_causal_lm(str(folder), "fp32", None)
    model.save_pretrained(tmp_path / "saved")
    assert not built.keys() & json.loads((tmp_path / "saved" / "config.json").read_text()).keys()
    assert not model.is_gradient_checkpointing
    assert {name: getattr(model.config, name, value) for name, value in OF_A_RUN.items()} == OF_A_RUN
    assert all(any(name in line for line in said if str(folder) in line) for name in OF_A_RUN)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing, "by the flag"


def test_quantised_weights_are_refused(assets, tmp_path):
    folder = changed(assets, tmp_path / "lm", {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(UserError, match="its weights are quantised .*method gptq.*unquantised weights"):
        load_causal_lm(str(folder), "fp32", None)
