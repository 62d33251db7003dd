"""Step 3 on two ranks: further reward sources, and failures and health events that end all
ranks."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import tiny_config
from launch import metrics_of, run_steps
from transformers import LlamaForSequenceClassification

from dschat_ppo.tools import toy

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

COMMON = (
    "--data_split 0,0,1 --dtype fp32 --max_prompt_seq_len 32 --max_answer_seq_len 6"
    " --per_device_generation_batch_size 2"
    " --n_samples_per_prompt 4 --per_device_training_batch_size 4 --num_warmup_steps 0"
    " --actor_learning_rate 0.003 --enable_test_mode"
)
# for cases that build or score a model in a way of their own; the others are about rewards
DIVIDED = "--actor_zero_stage 3 --critic_zero_stage 3 "
REWARDS = """
def letters(prompts, responses, **columns):
    return [
        response.count("e") + response.count("a") - 0.1 * len(response) for response in responses
    ]

def misspelt(responses, **columns):
    return [len(text) for text in reponses]

def half(response, number):
    return {"score": number / 2, "fourth": number % 4 == 0, "text": response}

def constant(responses):
    return [1.0] * len(responses)

def odd(prompts, completions, number, **columns):
    return [None if value % 4 == 3 else 1.0 for value in number]
"""


@pytest.fixture(scope="module")
def data(assets):
    """Numbered prompts, plain text, reward functions, a foreign reward model and one of steps."""
    prompts = [json.loads(line) for line in (assets / "prompts.jsonl").read_text().splitlines()]
    numbered = [
        {**row, "number": n, "data_source": ("even", "odd")[n % 2]} for n, row in enumerate(prompts)
    ]
    for name, rows in {"numbered": numbered, "plain": [{"text": "a few words"}] * 9}.items():
        (assets / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    (assets / "rewards.py").write_text(REWARDS, encoding="utf-8")
    foreign = LlamaForSequenceClassification(tiny_config(num_labels=1))
    foreign.config.reward_mean, foreign.config.reward_std = 0.25, 2.0
    foreign.save_pretrained(assets / "foreign")
    toy.make_tokenizer(["quite other words to merge than those of the actor"]).save_pretrained(
        assets / "foreign"
    )
    shutil.copytree(assets / "reward", assets / "prm")
    settings = json.loads((assets / "prm/config.json").read_text())
    (assets / "prm/config.json").write_text(json.dumps({**settings, "step_separator": "\n"}))
    return assets


class Service(BaseHTTPRequestHandler):
    """Scores the texts of all ranks but the one that asks first, which it refuses again and
    again."""

    refused: list[list[str]] = []

    def do_POST(self):  # noqa: N802
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        self.refused.append(query)
        answer = json.dumps({"rewards": [float(len(text)) for text in query]})
        self.send_response(500 if query == self.refused[0] else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *words):
        pass


def cases_of(data, url: str) -> dict[str, str]:
    """Name -> flags in addition to the common ones."""
    functions, learned = data / "rewards.py", f"--critic_model_name_or_path {data / 'reward'} "
    no_model = "--use_reward_model False --test_stop_step 10 "
    return {
        "remax": (
            f"{learned} {DIVIDED}--advantage_estimator remax --kl_target 0.01"
            " --normalize_rewards running "
            f"--test_stop_step 3 --reward_function {functions}:letters:0.5 "
            f"--unsupervised_dataset_name {data / 'plain.jsonl'} --unsup_coef 0.1"
        ),
        "all bad": (
            f"--advantage_estimator rloo --kl_coef 0 {no_model}"
            f"--reward_function {functions}:letters {functions}:misspelt:0"
        ),
        "routed": (
            f"--advantage_estimator rloo --reward_default -7 --reward_clip 0 {no_model}"
            f"--reward_function even={functions}:half odd={functions}:odd --num_train_epochs 1 "
            "--per_device_generation_batch_size 10 --per_device_training_batch_size 20"
        ),
        "foreign": (
            f"{DIVIDED}--advantage_estimator grpo"
            f" --reward_model_name_or_path {data / 'foreign'}"
            " --test_stop_step 1 --normalize_rewards model"
        ),
        "steps": (
            f"{DIVIDED}--critic_model_name_or_path {data / 'prm'} --process_reward min"
            " --test_stop_step 1"
        ),
        "new head": (
            f"{DIVIDED}{no_model}--reward_function {functions}:letters"
            " --critic_learning_rate 0.003"
            " --test_stop_step 3"
        ),
        "unhealthy": (
            "--advantage_estimator grpo --use_reward_model False --test_stop_step 3"
            f" --stop_on_health warning --reward_function {functions}:constant"
        ),
        "one rank": (
            f"--advantage_estimator grpo --remote_reward_timeout 1 {no_model} --remote_reward_url"
            f" {url}"
        ),
    }


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Case -> (metrics line by line, what was said, the error that ended it or None)."""
    folder = tmp_path_factory.mktemp("step3")
    common = [
        *COMMON.split(),
        "--data_path",
        data / "numbered.jsonl",
        "--actor_model_name_or_path",
        data / "lm",
    ]
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        cases = {
            name: ("ppo", [*common, "--output_dir", folder / name, *flags.split()])
            for name, flags in cases_of(data, f"http://127.0.0.1:{server.server_port}").items()
        }
        found = run_steps(cases | {"resumed": cases["unhealthy"]}, folder)
        server.shutdown()
    ends = {
        "all bad": "failed on every one",
        "one rank": "status 500",
        "unhealthy": "run the same command again",
    }
    for name, end in found.items():
        assert ends[name] in end["error"] if name in ends else end["error"] is None, name
    for name in cases:
        assert (folder / name / "result.json").exists() == (name not in ("all bad", "one rank"))
        assert (folder / name / "critic").exists() == (name in ("steps", "new head"))
    return {
        name: (
            metrics_of(folder / name) if (folder / name / "metrics.jsonl").exists() else [],
            end["said"],
            end["error"],
        )
        for name, end in found.items()
    }


def test_an_unhealthy_run_stops_on_all_ranks_and_resumes(runs):
    lines, _, error = runs["unhealthy"]
    assert error.startswith(
        "--stop_on_health warning: step 1: scores_equal: reward/score_std is 0, below 0.001"
    )
    assert "checkpoints/step_000001" in error and "resuming from" in runs["resumed"][1]
    assert [line["reward/score_mean"] for line in lines] == [1.0] * 3


def test_remax_with_a_function_a_learned_reward_and_plain_text(runs):
    lines, _, _ = runs["remax"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        total = line["reward/model_mean"] + 0.5 * line["reward/letters_mean"]
        assert line["reward/score_mean"] == pytest.approx(total, abs=1e-4)
        assert (
            line["policy/ptx_loss"] > 0
            and "value/loss" not in line
            and "optim/lr/critic" not in line
        )
    assert lines[0]["policy/ptx_loss"] > lines[-1]["policy/ptx_loss"]
    assert lines[0]["kl/coef"] == 0.1 != lines[-1]["kl/coef"]


def test_routed_functions_score_their_rows(runs):
    """Numbers 0 to 39, each once: n / 2 if even, 1 for every other odd one, and no source for the
    rest."""
    lines, said, _ = runs["routed"]
    prompts = 20  # of a PPO step
    total = sum(range(0, 40, 2)) / 2 + 10 - 7 * 10
    assert sum(line["reward/score_mean"] for line in lines) * prompts == pytest.approx(total)
    assert sum(line["reward/function_faults"] for line in lines) == 0, "None is no fault"
    unscored = sum(line["rollout/unscored_share"] for line in lines) * prompts
    assert unscored == pytest.approx(10)
    even = [line for line in lines if "reward/half_mean" in line]
    shares = [line.get("reward/half_share", 1) for line in even]
    for name, total in (("reward/half_mean", 190), ("reward/half/fourth", 10)):
        found = sum(line[name] * share for line, share in zip(even, shares, strict=True))
        assert found * prompts == pytest.approx(total)
    assert all(line.get("reward/odd_mean", 1.0) == 1.0 for line in lines) and len(lines) == 2
    assert (
        "no reward source scored" in said
        and "rewards.py:odd: called once per batch, as TRL's" in said
    )


def test_a_source_that_fails_on_the_first_rollout_or_for_one_rank_stops_all_ranks(runs):
    """`exact_match` has a weight of 0 and fails first; the function named after it fails too."""
    (first, _, error), (second, _, remote) = runs["all bad"], runs["one rank"]
    assert first == second == []
    assert "rewards.py:misspelt: failed on every one of the first 16 answers" in error
    assert "NameError: name 'reponses'" in error and "--remote_reward_url" in remote


def test_reward_models_with_another_tokenizer_and_of_steps(runs):
    (foreign, said, _), (steps, _, _) = runs["foreign"], runs["steps"]
    assert "has its own tokenizer" in said and foreign[0]["reward/score_std"] > 0
    assert all(
        0 < line["reward/score_min"] < line["reward/score_max"] < 1 and line["value/loss"] > 0
        for line in steps
    )


def test_a_critic_that_no_reward_model_began_values_every_token_0_at_first(runs):
    first, second, _ = runs["new head"][0]
    assert first["value/mean"] == first["value/std"] == first["value/explained_variance"] == 0
    assert second["value/std"] > 0 and first["optim/grad_norm/critic"] > 0
