"""`python -m dschat_ppo.tools.export`: what it takes from where, and what it refuses, with a
checkpoint of one rank."""

import json
import shutil

import pytest
import torch
from datasets import Dataset
from one_rank import one_rank  # noqa: F401
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dschat_ppo.checkpoint.identity import RunInputs
from dschat_ppo.checkpoint.store import CheckpointFolder
from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.loading import ModelChanges, load_causal_lm
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.run.session import open_session
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.supervised_run import MODEL
from dschat_ppo.supervised.trainer import SupervisedTrainer, fit_ds_config
from dschat_ppo.tools import checkpoint_models
from dschat_ppo.tools.export import main

pytestmark = pytest.mark.usefixtures("one_rank")

TRAIN = Dataset.from_list(
    [{"prompt_ids": [10 + row], "answers": [[40 + row, 1]]} for row in range(4)]
)
FROZEN = "model.layers.0."  # of the run with a frozen part


@pytest.fixture(scope="module")
def runs(one_rank, assets, tmp_path_factory):  # noqa: F811
    """A folder with two outputs of step 1 in bf16, `whole` and `part` (with a frozen layer), and
    their model `base`.

    `NAME_saved` is what the run saves at its end.
    """
    folder = tmp_path_factory.mktemp("exports")
    shutil.copytree(assets / "lm", folder / "base")
    for name, stage in (("whole", 2), ("part", 3)):
        words = (
            f"--model_name_or_path {folder}/base --data_path d --output_dir {folder}/{name}"
            " --learning_rate 0.01"
        )
        words += (
            f" --zero_stage {stage} --per_device_train_batch_size 2 --dropout 0.25 --save_minutes 0"
            " --save_steps 1"
        )
        config = parse("sft", words.split())
        ds_config = fit_ds_config(config)
        model = PolicyModel(
            load_causal_lm(str(folder / "base"), "bf16", ds_config, ModelChanges(0.25))
        )
        for parameter, weight in model.lm.named_parameters():
            weight.requires_grad_(name == "whole" or not parameter.startswith(FROZEN))
        session = open_session(
            folder / name,
            config,
            RunInputs(TRAIN, models=[(MODEL, str(folder / "base"))]),
            {},
            len(TRAIN) // 2,
        )
        trainer = SupervisedTrainer(
            model, ds_config, TokenRows(TRAIN, None), sft_objective(0, False, dist.device()), config
        )
        tokenizer = AutoTokenizer.from_pretrained(folder / "base")
        with session.training(trainer) as (writer, saver):
            trainer.run(writer, saver, "title")
        trainer.save(folder / f"{name}_saved", tokenizer)
    return folder


def run(*words) -> int:
    return main([str(word) for word in words])


def refusal(capsys, *words) -> str:
    assert run(*words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["whole", "part"])
def test_the_newest_checkpoint_of_an_output_folder_becomes_the_folder_that_the_run_saves(
    runs, tmp_path, name
):
    assert run(runs / name, tmp_path / "out") == 0
    saved = sorted(path.name for path in (runs / f"{name}_saved").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == saved
    for file in saved:
        assert (tmp_path / "out" / file).read_bytes() == (
            runs / f"{name}_saved" / file
        ).read_bytes()
    assert json.loads((tmp_path / "out/config.json").read_text())["attention_dropout"] == 0.25
    assert not (tmp_path / "out.partial").exists()


def test_a_checkpoint_with_a_frozen_part_does_not_hold_it(runs):
    checkpoint = CheckpointFolder(runs / "part").root / "step_000002"
    common = torch.load(checkpoint / "model/common.pt")
    assert common["frozen"] and not [name for name in common["shapes"] if FROZEN in name]
    assert run(checkpoint, runs / "again") == 0
    first, start = (
        load_file(runs / "again/model.safetensors"),
        load_file(runs / "base/model.safetensors"),
    )
    moved = {
        name for name, weight in first.items() if not torch.equal(weight, start[name].bfloat16())
    }
    assert moved == {name for name in first if not name.startswith(FROZEN)}


def test_an_earlier_checkpoint_and_the_fp32_masters(runs, tmp_path):
    checkpoint = CheckpointFolder(runs / "whole").root / "step_000001"
    assert run(checkpoint, tmp_path / "half") == 0
    assert run(checkpoint, tmp_path / "full", "--dtype", "fp32") == 0
    half, full = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "full"))
    last = load_file(runs / "whole_saved/model.safetensors")
    assert not any(torch.equal(half[name], last[name]) for name in last)
    assert all(torch.equal(full[name].bfloat16(), half[name]) for name in half)
    # they are not the rounded numbers
    assert any(not torch.equal(full[name], half[name].float()) for name in half)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "full").dtype == torch.float32


def test_numbers_beyond_the_range_of_the_dtype_are_refused(runs, tmp_path, capsys, monkeypatch):
    big = checkpoint_models.master_weights

    def scaled(*arguments):
        return ((name, weight * 1e6) for name, weight in big(*arguments))

    monkeypatch.setattr(checkpoint_models, "master_weights", scaled)
    assert "--dtype fp16: lm.model." in refusal(
        capsys, runs / "whole", tmp_path / "out", "--dtype", "fp16"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_replaced_only_if_asked(runs, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    assert "add --overwrite" in refusal(capsys, runs / "whole", out) and (out / "mine").exists()
    assert run(runs / "whole", out, "--overwrite") == 0
    assert not (out / "mine").exists() and (out / "config.json").exists()


def test_folders_that_are_read_are_never_replaced(runs, tmp_path, capsys):
    shutil.copytree(runs / "whole", tmp_path / "whole")
    for out in (tmp_path / "whole", tmp_path / "whole/checkpoints/step_000002", tmp_path):
        text = refusal(capsys, tmp_path / "whole", out, "--overwrite")
        assert (
            f"{out} would be written over {tmp_path}/whole/checkpoints/step_000002, which is read"
            in text
        )
    assert f"written over {runs}/base" in refusal(
        capsys, tmp_path / "whole", runs / "base", "--overwrite"
    )
    shutil.copytree(runs / "base", tmp_path / "moved")
    text = refusal(
        capsys, tmp_path / "whole", tmp_path / "moved", "--overwrite", "--model", tmp_path / "moved"
    )
    assert f"written over {tmp_path}/moved" in text
    assert CheckpointFolder(tmp_path / "whole").names() and (runs / "base/config.json").exists()


def test_a_model_that_is_gone_is_named_by_a_flag(runs, tmp_path, capsys):
    (runs / "base").rename(runs / "moved")
    try:
        text = refusal(capsys, runs / "part", tmp_path / "out")
        assert f"{MODEL} {runs}/base: no such folder" in text and "by --model FOLDER" in text
        assert run(runs / "part", tmp_path / "out", "--model", runs / "moved") == 0
        assert "is not, or no longer" not in capsys.readouterr().err
    finally:
        (runs / "moved").rename(runs / "base")
    saved, found = (
        load_file(folder / "model.safetensors")
        for folder in (runs / "part_saved", tmp_path / "out")
    )
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_another_model_is_refused_where_its_weights_count(runs, assets, tmp_path, capsys):
    other = assets / "uniform_lm"
    assert "whose frozen weights are needed" in refusal(
        capsys, runs / "part", tmp_path / "a", "--model", other
    )
    assert run(runs / "whole", tmp_path / "b", "--model", other) == 0
    assert "only its configuration and tokenizer are used" in capsys.readouterr().err
    shutil.copytree(other, tmp_path / "wide")
    config = AutoConfig.from_pretrained(other, num_hidden_layers=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    text = refusal(capsys, runs / "whole", tmp_path / "c", "--model", tmp_path / "wide")
    assert "holds the weights of another model" in text
    assert not (tmp_path / "c").exists()
