"""Step 3 with a process reward model on two ranks: scores of steps, token rewards, and resume."""

import json
import math
import shutil
import statistics

import pytest
import torch
from launch import forked, metrics_of, succeed
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

NOT_COMPARED = ("time", "time/", "memory/")
KL = 0.3
RUN = (
    "--data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len 12 --per_device_generation_batch_size 8 "
    f"--per_device_training_batch_size 4 --num_warmup_steps 0 --save_minutes 0 --dtype fp32 --kl_coef {KL} "
    "--actor_zero_stage 3 --critic_zero_stage 2 --actor_learning_rate 0.01 --critic_learning_rate 0.01"
)
STOPS = ["step_000001_update_0001", "step_000002"]  # inside the second PPO step, and between two
# run -> flags; the number of a run is its place
CASES = {
    "whole": "--process_reward min --max_steps 3",
    "cut": "--process_reward min --max_steps 3",
    "mean": "--process_reward mean --max_steps 1 --normalize_rewards running --reward_clip 0",
    "last": "--process_reward last --max_steps 1 --reward_clip 0.5",
    "product": "--process_reward product --max_steps 1",
}


@pytest.fixture(scope="module")
def models(assets, tmp_path_factory):
    """A folder with `prm`, whose steps end at line breaks, and `lm`, which often writes line breaks and ends."""
    folder = tmp_path_factory.mktemp("process")
    for name, source in (("prm", "reward"), ("lm", "lm")):
        shutil.copytree(assets / source, folder / name)
    settings = json.loads((folder / "prm/config.json").read_text())
    (folder / "prm/config.json").write_text(json.dumps({**settings, "step_separator": "\n"}))
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder / "lm"), AutoTokenizer.from_pretrained(folder / "lm")
    with torch.no_grad():  # one component of the state is large at every token, and the head adds it to two logits
        model.model.embed_tokens.weight[:, 0] += 3
        for token, weight in ((tokenizer.convert_tokens_to_ids("Ċ"), 1.0), (tokenizer.eos_token_id, 0.9)):
            model.lm_head.weight[token, 0] = weight
    model.save_pretrained(folder / "lm")
    return folder


@pytest.fixture(scope="module")
def runs(assets, models, tmp_path_factory):
    """The folder of all outputs and experiences."""
    folder = tmp_path_factory.mktemp("runs")
    paths = f"--actor_model_name_or_path {models}/lm --critic_model_name_or_path {models}/prm"
    paths += f" --data_path {assets}/prompts.jsonl"
    cases = {
        name: ("ppo", [*f"{paths} {RUN} {flags}".split(), "--output_dir", f"{folder}/{name}"],
               STOPS if name == "cut" else [], True)
        for name, flags in CASES.items()
    }  # fmt: skip
    (folder / "cases.json").write_text(json.dumps(cases))
    found = folder / "found.json"
    succeed(forked(2, "tests/workers/process_ppo.py", folder / "cases.json", found))
    starts = json.loads(found.read_text())
    assert [len(starts[name]) for name in CASES] == [1, 3, 1, 1, 1]
    assert all(of_case[-1]["ended"] == "done" for of_case in starts.values())
    return folder


def experience(folder, name: str, step: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"experience_{list(CASES).index(name)}_{step}.pt", weights_only=True)


def ends_of(tokenizer, answer: list[int]) -> list[int]:
    """Places of the tokens that end steps, token by token."""
    ends, text = [], ""
    for place, token in enumerate(answer):
        piece = tokenizer.decode([token])
        is_end = place == len(answer) - 1 and token in tokenizer.all_special_ids
        text += "" if is_end else piece
        if piece == "\n" and text.strip():
            ends.append(place)
        text = "" if piece == "\n" else text
    if ends and not text.strip():
        ends.pop()
    return sorted({*ends, len(answer) - 1})


def answers_of(rows) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of each row."""
    parts = zip(rows["prompt_ids"], rows["prompt_mask"], rows["response_ids"], rows["response_mask"], strict=True)
    return [(prompt[real].tolist(), answer[kept].tolist()) for prompt, real, answer, kept in parts]


@torch.no_grad()
def probabilities(models, rows) -> list[list[float]]:
    """Those of each step of each answer, by one forward pass of plain transformers for each row."""
    prm = LlamaForSequenceClassification.from_pretrained(models / "prm")
    tokenizer, found = AutoTokenizer.from_pretrained(models / "prm"), []
    for prompt, answer in answers_of(rows):
        states = prm.model(torch.tensor([prompt + answer])).last_hidden_state
        scores = prm.score(states)[0, len(prompt) :, 0].tolist()
        found.append([1 / (1 + math.exp(-scores[end])) for end in ends_of(tokenizer, answer)])
    return found


AGGREGATED = {"min": min, "mean": statistics.fmean, "last": lambda steps: steps[-1], "product": math.prod}


@pytest.mark.parametrize(("name", "step"), [("whole", 1), ("whole", 3), ("mean", 1), ("last", 1), ("product", 1)])
def test_the_score_of_the_steps_is_the_reward_of_the_last_token(runs, models, name, step):
    rows = experience(runs, name, step)
    how = "min" if name == "whole" else name
    expected = [AGGREGATED[how](steps) for steps in probabilities(models, rows)]
    assert rows["scores"].tolist() == pytest.approx(expected, abs=2e-5)
    if how == "mean":
        expected = [score / statistics.stdev(expected) for score in expected]
    if how == "last":
        expected = [min(score, 0.5) for score in expected]
    assert len(expected) == 16, "the rows of both ranks"
    for row, score in enumerate(expected):
        real = rows["response_mask"][row]
        drift = [KL * (old - ref) for old, ref in zip(*(rows[key][row][real].tolist() for key in
                 ("old_logprobs", "ref_logprobs")), strict=True)]  # fmt: skip
        by_hand = [-part for part in drift[:-1]] + [score - drift[-1]]
        assert rows["rewards"][row][real].tolist() == pytest.approx(by_hand, abs=5e-5)
        assert not rows["rewards"][row][~real].any()
    drift = (rows["old_logprobs"] - rows["ref_logprobs"]).abs().max()
    assert drift > 0.05 if step > 1 else drift < 1e-4


def test_the_answers_have_steps_of_every_kind(runs, models):
    """Else the test above would show little."""
    tokenizer = AutoTokenizer.from_pretrained(models / "prm")
    answers = [answer for _, answer in answers_of(experience(runs, "whole", 1))]
    numbers = [len(ends_of(tokenizer, answer)) for answer in answers]
    assert min(numbers) == 1 and max(numbers) >= 3
    ended = [answer[-1] == tokenizer.eos_token_id for answer in answers]
    assert any(ended) and not all(ended)
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    assert any(text.endswith("\n") for text in texts), "no answer ends with a separator"
    assert any("\n\n" in text for text in texts), "no blank step"


def compared(folder) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in metrics_of(folder)]


def test_a_resumed_run_is_that_of_an_uninterrupted_one(runs):
    assert compared(runs / "cut") == compared(runs / "whole") and len(compared(runs / "cut")) == 3
    for step in (1, 2, 3):
        one, other = (experience(runs, name, step) for name in ("whole", "cut"))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    for role in ("actor", "critic"):
        one, other = (load_file(runs / name / role / "model.safetensors") for name in ("whole", "cut"))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert "step_separator" not in json.loads((runs / "whole/critic/config.json").read_text())
