"""Teachers as models of a run: what is checked of them, and where else they count."""

import json
import shutil

import pytest
import torch
from datasets import Dataset
from planned_runs import HOST, SMALL, held, sft
from transformers import AutoTokenizer, LlamaForCausalLM

from dschat_ppo.algorithms.divergence import Divergence
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.engine.rlhf_engine import ModelFolders
from dschat_ppo.errors import UserError
from dschat_ppo.features.distillation.flags import TEACHER
from dschat_ppo.features.distillation.sft_terms import sft_divergence_term
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.planner.plan_step import GIB, plan_step
from dschat_ppo.ppo.begin_ppo import check_models, inputs_of, local_model_folders
from dschat_ppo.supervised.sft import sft_loss, sft_terms
from dschat_ppo.tools import data

NEEDED = "--data_path d --output_dir o --max_prompt_seq_len 64 --max_answer_seq_len 32"


@pytest.fixture(scope="module")
def folders(assets, tmp_path_factory):
    """The model `lm`, and copies of it whose tokenizers have a further token, and another end."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "lm").symlink_to(assets / "lm")
    for name in ("further_token", "other_end"):
        shutil.copytree(assets / "lm", folder / name)
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    other = next(token for token in tokenizer.all_special_tokens if token != tokenizer.eos_token)
    tokenizer.eos_token = other
    tokenizer.save_pretrained(folder / "other_end")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder / "further_token")
    return folder


def check(folders, teacher: str) -> None:
    words = f"--actor_model_name_or_path {folders}/lm {TEACHER} {folders}/{teacher}"
    alone = "--advantage_estimator none --use_reward_model False"
    config = parse("ppo", f"{words} {alone} {NEEDED}".split())
    check_models(config, local_model_folders(config), load_tokenizer(str(folders / "lm"), "model"))


def test_a_teacher_reads_the_tokens_of_the_actor(folders):
    message = "^--teacher_.*further_token: its tokenizer differs from that of the model"
    with pytest.raises(UserError, match=message):
        check(folders, "further_token")


def test_a_teacher_whose_answers_end_otherwise_is_warned_of(folders, said):
    check(folders, "lm")
    assert not any("ends its answers" in line for line in said)
    check(folders, "other_end")
    assert sum("other_end: ends its answers with" in line for line in said) == 1


def test_teachers_are_inputs_of_a_run(assets):
    words = f"--actor_model_name_or_path a {TEACHER} x=s y=t --kl_coef 0 --use_reward_model False"
    config = parse("ppo", f"{words} --reward_function exact_match {NEEDED}".split())
    further = {"teacher": str(assets / "lm"), "teacher 2": str(assets / "uniform_lm")}
    folders = ModelFolders(str(assets / "lm"), None, None, further=further)
    inputs = inputs_of(config, folders, TokenRows(Dataset.from_dict({"a": [1]}), None), [])
    assert dict(inputs.models) == {
        "--actor_model_name_or_path": str(assets / "lm"),
        f"{TEACHER} x": str(assets / "lm"),
        f"{TEACHER} y": str(assets / "uniform_lm"),
    }


def test_the_flags_of_step_1_say_how_it_compares_with_its_teacher(assets):
    words = f"{TEACHER} {assets}/lm --distill_loss jsd --distill_beta 0.3 --distill_coef 0.5"
    config = sft(f"{words} --dtype fp32")
    teacher = PolicyModel(LlamaForCausalLM.from_pretrained(assets / "lm"))
    [term] = sft_terms(config, {"teacher": teacher}.__getitem__)
    by_hand = sft_divergence_term(teacher, Divergence("jsd", 0.3), 0.5)
    model = PolicyModel(LlamaForCausalLM.from_pretrained(assets / "uniform_lm"))
    batch = SFTBatch(torch.tensor([[9, 8, 7]]), torch.tensor([[False, True, True]]))
    losses = []
    for each in (term, by_hand):
        losses.append(sft_loss(model, batch, torch.tensor(2.0), MetricSums(), [each]).item())
    assert losses[0] == losses[1]


def test_the_teacher_of_step_1_counts_in_a_plan():
    config = sft(f"{TEACHER} t")
    plan = plan_step(config, {"model": SMALL, "teacher": SMALL}, 1, 80 * GIB, HOST)
    assert held(plan, "update", "teacher", "weights") == held(plan, "update", "model", "weights")
    assert held(plan, "update", "teacher", "optimizer") == 0


def test_a_route_without_prompts_is_refused(assets, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{number}:", "data_source": "chat"} for number in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"--step 3 --data_path {path} --data_split 0,0,1 --data_output_path {tmp_path}/cache"
    words += f" --tokenizer {assets}/lm --reward_function numeric_match {TEACHER} math=t"
    assert data.main(words.split()) == 2
    assert "no prompt has the data source 'math'; there are: chat" in (capsys.readouterr().err)
