"""Step 3 on two ranks: further options, and failures of reward sources."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml
from conftest import tiny_config
from launch import metrics_of, run_steps
from transformers import AutoTokenizer, LlamaForSequenceClassification, MixtralConfig, MixtralForCausalLM

from dschat_ppo.tools import toy

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

COMMON = (
    "--data_split 0,0,1 --dtype fp32 --actor_zero_stage 3 --critic_zero_stage 3 --max_prompt_seq_len 32 "
    "--max_answer_seq_len 6 --per_device_generation_batch_size 2 --n_samples_per_prompt 4 "
    "--per_device_training_batch_size 4 --num_warmup_steps 0 --actor_learning_rate 0.003 --enable_test_mode"
)
REWARDS = """
import math, os, time

def letters(prompts, responses, **columns):
    return [response.count("e") + response.count("a") - 0.1 * len(response) for response in responses]

def equal(prompts, responses, **columns):
    return [1.0] * len(responses)

def bad(prompts, responses, number, **columns):
    if len(responses) > 1 or number[0] % 4 == 3:
        raise RuntimeError("cannot score this")
    return [math.nan if number[0] % 4 == 2 else float(number[0])]

def truth(prompt, response):
    return float("e" in response)

def misspelt(reponses, **columns):
    return [len(text) for text in reponses]

def half(response, number):
    return {"score": number / 2, "fourth": number % 4 == 0, "text": response}

def odd(prompts, completions, number, **columns):
    return [None if value % 4 == 3 else 1.0 for value in number]

def gold(response, answer):
    return float(answer in response)
"""


@pytest.fixture(scope="module")
def data(assets):
    """Numbered prompts, held-out prompts, plain text, reward functions, a mixture of experts and a foreign reward."""
    prompts = [json.loads(line) for line in (assets / "prompts.jsonl").read_text().splitlines()]
    numbered = [{**row, "number": n, "data_source": ("even", "odd")[n % 2]} for n, row in enumerate(prompts)]
    for name, rows in {"numbered": numbered, "held_out": numbered[:5], "plain": [{"text": "a few words"}] * 9}.items():
        (assets / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (assets / "rewards.py").write_text(REWARDS, encoding="utf-8")
    torch.manual_seed(5)
    experts = MixtralConfig(**{**tiny_config().to_dict(), "model_type": "mixtral", "num_local_experts": 4})
    MixtralForCausalLM(experts).save_pretrained(assets / "experts")
    AutoTokenizer.from_pretrained(assets / "lm").save_pretrained(assets / "experts")
    foreign = LlamaForSequenceClassification(tiny_config(num_labels=1))
    foreign.config.reward_mean, foreign.config.reward_std = 0.25, 2.0
    foreign.save_pretrained(assets / "foreign")
    toy.make_tokenizer(["quite other words to merge than those of the actor"]).save_pretrained(assets / "foreign")
    shutil.copytree(assets / "reward", assets / "prm")
    settings = json.loads((assets / "prm/config.json").read_text())
    (assets / "prm/config.json").write_text(json.dumps({**settings, "step_separator": "\n"}))
    return assets


class Service(BaseHTTPRequestHandler):
    """What the path asks for: a good answer (the length of each text), or a fault."""

    asked: dict[str, list[list[str]]] = {}

    def do_POST(self):  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        before = self.asked.setdefault(self.path, [])
        before.append(body["query"])
        one_rank = self.path == "/one_rank" and body["query"] == before[0]  # the first to come, again and again
        flaky = self.path == "/flaky" and len(before) == 1
        answer = json.dumps({"rewards": [float(len(text)) for text in body["query"]]})
        try:
            self.send_response(500 if flaky or one_rank else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())
        except BrokenPipeError:  # the trainer has given up
            pass

    def log_message(self, *words):
        pass


@pytest.fixture(scope="module")
def service():
    """Address of a reward service of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def cases_of(data, url: str) -> dict[str, str]:
    """Name -> flags in addition to the common ones."""
    functions, learned = data / "rewards.py", f"--critic_model_name_or_path {data / 'reward'} "
    no_model = "--use_reward_model False --test_stop_step {} "
    letters = f"--reward_function {functions}:letters "
    evaluated = f"{letters} --advantage_estimator grpo --eval_samples 4 --eval_interval 1 --eval_batch_size 2 "
    evaluated += f"--eval_data_path {data / 'held_out.jsonl'} --eval_reward_function {functions}:truth "
    dynamic = "--advantage_estimator grpo --dynamic_sampling --dynamic_sampling_rounds 2 "
    remote = "--advantage_estimator grpo --remote_reward_timeout 1 "
    remote += no_model.format(1) + f"--remote_reward_url {url}"
    away = remote.replace(url, "http://127.0.0.1:9")
    mixed = f"--advantage_estimator grpo {learned} --remote_reward_weight 0.25 --test_stop_step 1 "
    return {
        "remax": f"{learned} --advantage_estimator remax --kl_target 0.01 --normalize_rewards running "
        f"--test_stop_step 3 --reward_function {functions}:letters:0.5 "
        f"--unsupervised_dataset_name {data / 'plain.jsonl'} --unsup_coef 0.1",
        "bad calls": f"--advantage_estimator rloo --reward_default -7 --reward_clip 0 {no_model.format(10)}"
        f"--reward_function {functions}:bad --num_train_epochs 1",
        "all bad": f"--advantage_estimator rloo --kl_coef 0 {no_model.format(10)}"
        f"--reward_function exact_match?ignore_case=true:0 {functions}:misspelt",
        "routed": f"--advantage_estimator rloo --reward_default -7 --reward_clip 0 {no_model.format(10)}"
        f"--reward_function even={functions}:half odd={functions}:odd --num_train_epochs 1",
        "no such route": f"--advantage_estimator rloo {no_model.format(1)} --reward_function math={functions}:half",
        "all bad in evaluation": f"{no_model.format(1)} {evaluated.replace(':truth', ':gold')}",
        "dynamic": dynamic + no_model.format(2) + letters,
        "dynamic, all equal": dynamic + no_model.format(1) + f"--reward_function {functions}:equal",
        "warm-up": f"{learned} --critic_warmup_rollouts 2 --lr_scheduler_type linear --test_stop_step 4",
        "new head": no_model.format(1) + letters,
        "evaluated": no_model.format(2) + evaluated,
        "settings": no_model.format(1) + letters + "--advantage_estimator gpg --policy_loss reinforce "
        "--importance_correction sequence",
        "experts": f"--actor_model_name_or_path {data / 'experts'} --advantage_estimator grpo --router_loss_coef 0.5 "
        + no_model.format(2) + letters,
        "foreign": f"--advantage_estimator grpo --reward_model_name_or_path {data / 'foreign'} --test_stop_step 1 "
        "--normalize_rewards model",
        "steps": f"--critic_model_name_or_path {data / 'prm'} --process_reward min --test_stop_step 1",
        "flaky": mixed + f"--remote_reward_url {url.replace('://', '://me:s3cret@')}/flaky --save_steps 1",
        "one_rank": remote + "/one_rank",
        "away": away,
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(data, service, tmp_path_factory):
    """Case -> (output folder, metrics line by line, what was said, the error that ended it or None)."""
    folder = tmp_path_factory.mktemp("step3")
    common = [*COMMON.split(), "--data_path", data / "numbered.jsonl", "--actor_model_name_or_path", data / "lm"]
    cases = {
        name: ("ppo", [*common, "--output_dir", folder / name.replace(" ", "_"), *flags.split()])
        for name, flags in cases_of(data, service).items()
    }
    saved = folder / "settings" / "config.yaml"
    cases["settings again"] = (
        "ppo", ["--config", saved, "--overwrite_output_dir", "True", "--output_dir", folder / "settings_again"]
    )  # fmt: skip
    found = run_steps(cases, folder)
    result = {}
    for name, (_, words) in cases.items():
        out = words[words.index("--output_dir") + 1]
        lines = metrics_of(out) if (out / "metrics.jsonl").exists() else []
        result[name] = (out, lines, found[name]["said"], found[name]["error"])
    return result


def finished(runs, name: str):
    """(folder, metrics, what was said) of a run that came to its end."""
    out, lines, said, error = runs[name]
    assert error is None and (out / "result.json").exists()
    return out, lines, said


def test_remax_with_a_function_a_learned_reward_and_plain_text(runs):
    out, lines, _ = finished(runs, "remax")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        total = line["reward/model_mean"] + 0.5 * line["reward/letters_mean"]
        assert line["reward/score_mean"] == pytest.approx(total, abs=1e-4)
        assert line["policy/ptx_loss"] > 0 and "value/loss" not in line and "optim/lr/critic" not in line
    assert lines[0]["policy/ptx_loss"] > lines[-1]["policy/ptx_loss"]
    assert lines[0]["kl/coef"] == 0.1 != lines[-1]["kl/coef"]
    assert (out / "actor/model.safetensors").exists() and not (out / "critic").exists()


def test_failing_calls_of_a_reward_function_give_the_default_score(runs):
    _, lines, said = finished(runs, "bad calls")
    assert len(lines) == 10  # 40 prompts, 4 a step, each seen once: a quarter raise, a quarter are NaN
    assert sum(line["reward/function_faults"] for line in lines) == 20 * 4
    good = sum(number for number in range(40) if number % 4 < 2)
    assert sum(line["reward/score_mean"] for line in lines) * 4 == pytest.approx(good - 7 * 20)
    assert "cannot score this" in said


def test_routed_functions_score_their_rows(runs):
    """Numbers 0 to 39, each once: n / 2 if even, 1 for every other odd one, and no source for the rest."""
    _, lines, said = finished(runs, "routed")
    assert sum(line["reward/score_mean"] for line in lines) * 4 == pytest.approx(sum(range(0, 40, 2)) / 2 + 10 - 7 * 10)
    assert sum(line["reward/function_faults"] for line in lines) == 10 * 4
    even = [line for line in lines if "reward/half_mean" in line]
    shares = [line.get("reward/half_share", 1) for line in even]
    for name, total in (("reward/half_mean", 190), ("reward/half/fourth", 10)):
        assert sum(line[name] * share for line, share in zip(even, shares, strict=True)) * 4 == pytest.approx(total)
    assert all(line.get("reward/odd_mean", 1.0) == 1.0 for line in lines) and len(lines) == 10
    assert "no reward source scored" in said and "rewards.py:odd: called once per batch, as TRL's" in said


def test_a_route_that_leads_nowhere_stops_before_a_model_is_loaded(runs):
    _, lines, _, error = runs["no such route"]
    assert lines == [] and "no training prompt has the data source 'math'; there are: even, odd" in error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("all bad", ["--reward_function exact_match: failed on every one of the first 16 answers", "column 'answer'"]),
        ("all bad in evaluation", ["--eval_reward_function ", "rewards.py:gold: ", " first 24 answers", "TypeError"]),
    ],
)
def test_a_function_that_fails_on_the_whole_first_rollout_stops_all_ranks(runs, name, words):
    """`exact_match` has a weight of 0 and fails first; the function named after it fails too."""
    out, lines, _, error = runs[name]
    assert error is not None and all(word in error for word in words), error
    assert lines == [] and not (out / "result.json").exists()


def test_dynamic_sampling_fills_steps_and_logs_where_it_cannot(runs):
    _, lines, _ = finished(runs, "dynamic")
    assert all(line["rollout/dynamic_sampling_filled_rows"] == 0 for line in lines)
    assert all(line["reward/equal_groups_share"] == 0 for line in lines)
    assert all(line["kl/coef"] == 0 and "kl/ref_k1" not in line for line in lines), "grpo loads no reference unasked"
    _, lines, said = finished(runs, "dynamic, all equal")
    assert lines[0]["rollout/dynamic_sampling_rounds"] == 2 and lines[0]["rollout/dynamic_sampling_kept_share"] == 0
    assert lines[0]["rollout/dynamic_sampling_filled_rows"] == 16
    assert lines[0]["optim/grad_norm/actor"] == 0
    assert "dynamic sampling: 2 rounds gave too few" in said


def test_the_critic_warms_up_for_exactly_n_rollouts(runs):
    _, lines, _ = finished(runs, "warm-up")
    assert ["optim/grad_norm/actor" in line for line in lines] == [False, False, True, True]
    assert all(line["optim/grad_norm/critic"] > 0 for line in lines)
    assert [line["optim/lr/actor"] for line in lines] == pytest.approx(
        [0.003, 0.003, 0.003, 0.0015]
    )  # 4 updates in all


def test_a_critic_without_reward_model_starts_from_the_actor_with_a_new_head(runs):
    out, lines, said = finished(runs, "new head")
    assert "no scalar head; a new one is initialised" in said
    assert lines[0]["value/loss"] > 0
    assert (out / "critic/config.json").exists()


def check_evaluation(out, lines) -> list[list[str]]:
    """What `eval/`, metrics and result say agrees; the answers to each prompt before training."""
    assert [line["step"] for line in lines] == [0, 1, 2]
    rows = [json.loads(line) for line in (out / "eval/step_000000.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    scores = [float("e" in answer) for row in rows for answer in row["answers"]]
    assert [score for row in rows for score in row["scores"]] == scores
    assert lines[0]["eval/score"] == pytest.approx(sum(scores) / 20)
    found = json.loads((out / "result.json").read_text())
    best = max(lines, key=lambda line: line["eval/score"])
    assert (found["best_step"], found["best_eval_score"]) == (best["step"], best["eval/score"])
    assert (out / "best/actor").exists() == (best["step"] > 0)
    return [row["answers"] for row in rows]


def test_evaluation_writes_answers_and_keeps_the_best(data, runs, tmp_path):
    two_ranks = check_evaluation(*finished(runs, "evaluated")[:2])
    words = [*COMMON.split(), "--data_path", data / "numbered.jsonl", "--actor_model_name_or_path", data / "lm"]
    words += [*cases_of(data, "")["evaluated"].split(), "--output_dir", tmp_path / "out"]
    words += ["--per_device_generation_batch_size", 4, "--per_device_training_batch_size", 8]
    assert run_steps({"evaluated": ("ppo", words)}, tmp_path, ranks=1)["evaluated"]["error"] is None
    assert check_evaluation(tmp_path / "out", metrics_of(tmp_path / "out")) == two_ranks


def test_resolved_settings_are_saved(runs):
    first, second = (finished(runs, name)[0] for name in ("settings", "settings again"))
    assert yaml.safe_load((first / "config.yaml").read_text())["advantage_estimator"] == "gpg"
    totals = [json.loads((out / "result.json").read_text())["reward/total_mean_after"] for out in (first, second)]
    assert totals[0] == totals[1]


def test_the_router_of_a_mixture_of_experts_learns_under_zero_3(runs):
    _, lines, _ = finished(runs, "experts")
    assert all(line["policy/router_loss"] >= 1 for line in lines), "1 is a balanced load"
    assert all(line["optim/grad_norm/actor"] > 0 for line in lines)


def test_a_reward_model_with_another_tokenizer_and_statistics(runs):
    out, lines, said = finished(runs, "foreign")
    assert "has its own tokenizer" in said
    assert lines[0]["reward/score_std"] > 0
    assert not (out / "critic").exists()


def test_a_process_reward_model_scores_by_probabilities(runs):
    _, lines, _ = finished(runs, "steps")
    assert all(0 < line["reward/score_min"] < line["reward/score_max"] < 1 for line in lines)
    assert all(line["value/loss"] > 0 for line in lines)


def test_a_service_that_fails_once_is_retried(runs):
    out, lines, said = finished(runs, "flaky")
    texts = [text for batch in Service.asked["/flaky"][1:] for text in batch]
    asked_twice = Service.asked["/flaky"][0]
    assert asked_twice in Service.asked["/flaky"][1:]
    remote = sum(map(len, texts)) / len(texts)
    assert len(texts) == 16
    assert lines[0]["reward/remote_mean"] == pytest.approx(remote)
    assert lines[0]["reward/score_mean"] == pytest.approx(lines[0]["reward/model_mean"] + 0.25 * remote, rel=1e-5)
    assert "s3cret" not in said and "//***@127.0.0.1" in (out / "config.yaml").read_text()
    assert [path for path in out.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("one_rank", "status 500"),
        ("away", "Connection refused"),
    ],
)
def test_an_unreachable_service_stops_all_ranks(runs, name, cause):
    out, lines, _, error = runs[name]
    assert error is not None and "--remote_reward_url" in error and cause in error
    assert lines == [] and not (out / "result.json").exists()
