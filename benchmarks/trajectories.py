"""Whether a change of the code changes a number: the same training runs before and after it,
compared to the last bit.

    python benchmarks/trajectories.py --json before.json --checkpoints FOLDER         (records)
    python benchmarks/trajectories.py --against before.json                           (compares)
    python benchmarks/trajectories.py --against before.json
        --resume_from FOLDER      (compares resumed runs)

The runs are `deepspeed` commands on the scripts of `--tree`, by default the repository of this
file: the three steps of the quickstart, GAE with most of what step 3 can switch on, GRPO with
dynamic sampling and PTX, DPO, and the other advantage estimators with the other policy losses on
one rank. What counts are all lines of `metrics.jsonl` and `result.json` without times and memory,
and a SHA-256 of the tensors in each saved weight file.

`--checkpoints` keeps models, data and outputs. From there `--resume_from` resumes GAE, GRPO and DPO
in the middle, also inside a PPO step, into new output folders; later metrics and final weights must
be those of the recording.

A recording holds for one machine and one set of libraries. The exit code is 1 if something differs,
and each difference is named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import measure
import torch
from measure import ROOT, environment, launcher, logged
from safetensors.torch import load_file

LIBRARIES = ("torch", "deepspeed", "transformers", "tokenizers")
MISSING, RESULT = "missing", "result"

# A reward with few values, so that answers to one prompt are often equal and dynamic sampling has
# something to drop.
SCORES = """def vowels(response: str) -> float:
    share = sum(letter in "aeiou" for letter in response) / (1 + len(response))
    return round(10 * share) / 2
"""


@dataclass(frozen=True)
class Run:
    """One command. `{made}` in `flags` is the folder of models and data; `resumed` names
    checkpoints to resume from."""

    script: str
    flags: str
    ranks: int = 2
    needs: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()


FIT = "--max_seq_len 128 --per_device_eval_batch_size 64 --zero_stage 3 --num_warmup_steps 5"
SFT = (
    "--model_name_or_path {made}/toy/model --data_path {made}/toy/data/sft.jsonl --data_split"
    f" 1,5,4 {FIT} --eval_data_path {{made}}/toy/data/sft_eval.jsonl --per_device_train_batch_size"
    " 32 --learning_rate 2e-3 --num_train_epochs 2 --dtype bf16"
)
PAIRS = (
    "--model_name_or_path {made}/sft --data_path {made}/toy/data/pairs.jsonl --data_split"
    f" 4,1,5 {FIT} --eval_data_path {{made}}/toy/data/pairs_eval.jsonl"
    " --per_device_train_batch_size 16 --num_train_epochs 1"
)
DPO = (
    "--learning_rate 1e-3 --dtype fp32 --dropout 0.1 --gradient_checkpointing --lr_scheduler_type"
    " linear --weight_decay 0.01 --eval_interval 4 --eval_iters 1 --save_steps 3 --save_total_limit"
    " 9 --keep_final_checkpoint"
)
STEP3 = (
    "--actor_model_name_or_path {made}/sft --critic_model_name_or_path {made}/reward --data_split"
    " 0,0,1 --data_path {made}/toy/data/prompts.jsonl --max_prompt_seq_len 64 --enable_test_mode"
    " --actor_zero_stage 3 --critic_zero_stage 3"
)
PPO = (
    "--max_answer_seq_len 48 --per_device_generation_batch_size 32 --per_device_training_batch_size"
    " 16 --ppo_epochs 2 --actor_learning_rate 1.5e-4 --critic_learning_rate 2e-4 --num_warmup_steps"
    " 2 --dtype bf16 --test_stop_step 3"
)
EVERY_UPDATE = "--save_minutes 0.00001 --save_total_limit 99 --keep_final_checkpoint"
GAE = (
    "--dtype fp32 --test_stop_step 4 --max_answer_seq_len 20 --per_device_generation_batch_size 4"
    " --generation_batches 2 --n_samples_per_prompt 2 --per_device_training_batch_size 8"
    " --ppo_epochs 2 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --num_warmup_steps 0"
    " --lr_scheduler_type linear --actor_dropout 0.1 --critic_dropout 0.1 --kl_target 0.05"
    " --kl_horizon 200 --entropy_target 3 --entropy_coef 0.01 --normalize_rewards running"
    " --enable_ema --ema_decay 0.9 --sleep_in_rollout --actor_gradient_checkpointing --temperature"
    " 0.9 --top_p 0.95 --missing_eos_penalty 0.5 --critic_weight_decay 0.01 --save_best True"
    " --eval_data_path {made}/toy/data/heldout.jsonl --eval_interval 2 --eval_max_prompts 16"
    " --eval_samples 2"
)
FUNCTION = (
    "--actor_model_name_or_path {made}/sft --data_path {made}/toy/data/prompts.jsonl --data_split"
    " 0,0,1 --use_reward_model False --reward_function {made}/scores.py:vowels --reward_timeout 600"
    " --reward_workers 1 --max_prompt_seq_len 64 --max_answer_seq_len 20 --enable_test_mode"
    " --test_stop_step 4 --ppo_epochs 2 --actor_learning_rate 5e-4 --num_warmup_steps 1"
)
GRPO = (
    "--advantage_estimator grpo --n_samples_per_prompt 4 --dynamic_sampling --dtype bf16"
    " --actor_zero_stage 2 --unsupervised_dataset_name {made}/plain.jsonl --unsup_coef 0.1"
    " --kl_coef 0.1 --kl_estimator k3 --per_device_generation_batch_size 4"
    " --per_device_training_batch_size 8 --actor_dropout 0.1 --enable_ema"
)
RUNS = {
    "sft": Run("step1_sft", SFT),
    "reward": Run("step2_reward", f"{PAIRS} --learning_rate 5e-4 --dtype bf16", needs=("sft",)),
    "ppo": Run("step3_ppo", f"{STEP3} {PPO}", needs=("sft", "reward")),
    "gae": Run(
        "step3_ppo",
        f"{STEP3} {GAE} {EVERY_UPDATE}",
        needs=("sft", "reward"),
        resumed=("step_000001_update_0003", "step_000002"),
    ),
    "grpo": Run(
        "step3_ppo",
        f"{FUNCTION} {GRPO} {EVERY_UPDATE}",
        needs=("sft",),
        resumed=("step_000001_update_0002", "step_000003"),
    ),
    "dpo": Run("step2_dpo", f"{PAIRS} {DPO}", needs=("sft",), resumed=("step_000003",)),
}
ONE_RANK = {
    "gae": (
        "--dtype fp32 --critic_learning_rate 1e-2 --critic_warmup_rollouts 1 --value_clip_eps 0"
        " --gae_lambda 0.9 --gamma 0.99 --whiten_advantages False --mask_truncated_answers"
        " --clip_eps_low 0.1 --clip_eps_high 0.3 --target_kl 0.0005 --kl_coef 0.05"
        " --generation_batches 2"
    ),
    "dr_grpo": (
        "--dtype bf16 --policy_loss cispo --kl_loss_coef 0.1 --importance_correction token"
        " --importance_cap 1.5 --off_policy_delta 0.001 --top_k 9 --min_answer_seq_len 2"
    ),
    "rloo": (
        "--dtype fp32 --policy_loss reinforce --kl_loss_coef 0.1 --kl_loss_estimator full --kl_coef"
        " 0.1 --kl_estimator full --normalize_rewards running --loss_aggregation seq_mean_token_sum"
        " --overlong_buffer 3 --overlong_penalty 0.5 --max_grad_norm 0.1"
    ),
    "reinforce_plus_plus": (
        "--dtype fp32 --policy_loss clip_cov --covariance_share 0.3 --dual_clip 1.2"
        " --high_entropy_share 0.6 --gamma 0.95 --kl_estimator abs --rollout_engine padded"
    ),
    "reinforce_plus_plus_baseline": (
        "--dtype bf16 --policy_loss kl_cov --covariance_share 0.2 "
        "--entropy_coef 0.01 --reward_clip 0.5 --stop_strings the --repetition_penalty 1.1"
    ),
    "remax": (
        "--dtype fp32 --kl_loss_coef 0.2 --kl_loss_estimator k1 --kl_straight_through False"
        " --kl_coef 0.1 --kl_estimator k2 --max_log_ratio 0.2 --old_logprobs recompute --min_p 0.02"
    ),
    "opo": (
        "--dtype fp32 --policy_loss sapo --sapo_tau_positive 0.8 --sapo_tau_negative 1.2"
        " --adam_beta1 0.8 --gradient_accumulation_steps 2 --seed 7"
    ),
    "gpg": (
        "--dtype fp32 --policy_loss gmpo --clip_eps 0.05 --loss_aggregation constant"
        " --actor_weight_decay 0.1 --micro_batch_tokens 64"
    ),
    "grpo_pass_at_k": (
        "--dtype bf16 --policy_loss gspo --clip_eps 0.01 --importance_correction sequence "
        "--importance_mode mask --importance_cap 1.2 --normalize_group_std False --kl_coef 0.05"
    ),
}
RUNS |= {
    f"one_rank_{estimator}": Run(
        "step3_ppo",
        f"{FUNCTION} --advantage_estimator {estimator} --n_samples_per_prompt 4"
        f" --per_device_generation_batch_size 8 --per_device_training_batch_size 16 {flags}",
        ranks=1,
        needs=("sft",),
    )
    for estimator, flags in ONE_RANK.items()
}

Record = dict[str, Any]  # "metrics": lines; "weights": path in the output folder -> SHA-256


class Tree:
    """The source tree in `folder`, whose code must be the one that is imported; `work` gets
    outputs, logs and data."""

    def __init__(self, folder: Path, work: Path):
        self.folder, self.work = folder, work
        self.env = environment(folder, HF_HUB_OFFLINE="1", HF_HOME=str(work / "hf"))
        found = self.call(
            [sys.executable, "-c", "import dschat_ppo; print(dschat_ppo.__file__)"],
            work / "import.log",
        ).strip()
        if not Path(found).resolve().is_relative_to(folder):
            sys.exit(f"{found} is imported, which is not in {folder}")

    def call(self, words: list[str], log: Path) -> str:
        """Run a command on the code of the tree, its output in `log`; returns that. `SystemExit` if
        it fails."""
        return logged(words, log, self.work, self.env)

    def make_inputs(self) -> Record:
        """Models, data and the reward function that the runs start from."""
        self.call(
            [sys.executable, "-m", "dschat_ppo.tools.toy", str(self.work / "toy")],
            self.work / "toy.log",
        )
        (self.work / "scores.py").write_text(SCORES, encoding="utf-8")
        texts = [
            json.dumps(
                {"text": f"The lamp is in hall {number}, and the kite in attic {number * number}."}
            )
            for number in range(200)
        ]
        (self.work / "plain.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
        return {"metrics": [], "weights": weights_of(self.work)}

    def train(self, name: str, made: Path, checkpoint: str | None = None) -> Record:
        """Make one run of `RUNS` from the inputs in `made`, or resume it from a checkpoint of this
        name there; returns what it left."""
        run, started = RUNS[name], time.perf_counter()
        label = name if checkpoint is None else f"{name} from {checkpoint}"
        output = self.work / label.replace(" ", "_")
        words = [*launcher(run.ranks), str(self.folder / "training" / run.script / "main.py")]
        words += [word.format(made=made) for word in run.flags.split()]
        words += ["--output_dir", str(output), "--data_output_path", str(self.work / "prepared")]
        if checkpoint is not None:
            words += ["--resume", str(made / name / "checkpoints" / checkpoint)]
        self.call(words, self.work / f"{output.name}.log")
        print(f"{label}: {time.perf_counter() - started:.0f} s", flush=True)
        return {"metrics": metrics_of(output), "weights": weights_of(output)}


def metrics_of(output: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, and `result.json` as another line, without times and memory."""
    result = {"step": RESULT} | json.loads((output / "result.json").read_text(encoding="utf-8"))
    return [*measure.metrics_of(output), measure.without_times(result)]


def weights_of(output: Path) -> dict[str, str]:
    """Path -> `digest` of each saved weight file; checkpoints are left out, a resumed run tells of
    them."""
    files = sorted(
        path for path in output.rglob("*.safetensors") if "checkpoints" not in path.parts
    )
    return {str(path.relative_to(output)): digest(path) for path in files}


def digest(file: Path) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of the tensors of a safetensors file."""
    found = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def chosen_runs(only: list[str]) -> list[str]:
    """Names of these runs and of those that they need, in the order of `RUNS`; none given: all."""
    wanted = set(only or RUNS)
    for name in reversed(RUNS):
        wanted |= set(RUNS[name].needs) if name in wanted else set()
    return [name for name in RUNS if name in wanted]


def record(tree: Tree, names: list[str]) -> dict[str, Record]:
    """Run -> what it left; runs on one rank two at a time."""
    found = {"inputs": tree.make_inputs()}
    for name in names:
        if RUNS[name].ranks > 1:
            found[name] = tree.train(name, tree.work)
    alone = [name for name in names if RUNS[name].ranks == 1]
    with ThreadPoolExecutor(2) as pool:
        return found | dict(
            zip(alone, pool.map(lambda name: tree.train(name, tree.work), alone), strict=True)
        )


def compare(found: dict[str, Record], recorded: dict[str, Record]) -> Iterator[str]:
    """A line for each difference between runs and their recording."""
    for name, run in found.items():
        if name not in recorded:
            yield f"{name}: is not in the recording"
        else:
            yield from differences(name, run, recorded[name])


def resume(tree: Tree, made: Path, names: list[str], recorded: dict[str, Record]) -> Iterator[str]:
    """A line for each difference between runs resumed from the checkpoints below `made` and the
    recording."""
    for name in names:
        for checkpoint in RUNS[name].resumed:
            found = tree.train(name, made, checkpoint)
            done = int(re.findall(r"\d+", checkpoint)[0])
            later = [
                line
                for line in recorded[name]["metrics"]
                if line["step"] == RESULT or line["step"] > done
            ]
            # the best models stay in the first output folder, unless a later evaluation is better
            weights = recorded[name]["weights"].items()
            weights = {
                path: sha
                for path, sha in weights
                if path in found["weights"] or not path.startswith("best/")
            }
            yield from differences(
                f"{name} from {checkpoint}", found, {"metrics": later, "weights": weights}
            )


def differences(name: str, found: Record, recorded: Record) -> Iterator[str]:
    """A line for each step with another metric, which names the first, and for each file of other
    weights.

    A metric that the recording does not know is new, not another number.
    """
    lines = [{line["step"]: line for line in side["metrics"]} for side in (recorded, found)]
    for step in lines[0] | lines[1]:
        before, now = (side.get(step, {}) for side in lines)
        if bool(before) != bool(now):
            yield f"{name}, step {step}: {'only now' if now else 'only in the recording'}"
            continue
        for metric, value in before.items():
            if now.get(metric, MISSING) != value:
                yield (
                    f"{name}, step {step}, {metric}: {value} in the recording,"
                    f" {now.get(metric, MISSING)} now"
                )
                break
    before, now = recorded["weights"], found["weights"]
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) != now.get(path):
            yield (
                f"{name}, {path}: {before.get(path, MISSING)} in the recording,"
                f" {now.get(path, MISSING)} now"
            )


def machine() -> dict[str, str]:
    """What the numbers depend on besides the code."""
    return {"cpu": torch.backends.cpu.get_cpu_capability()} | {
        name: version(name) for name in LIBRARIES
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="source tree whose code runs")
    parser.add_argument("--json", type=Path, help="write what the runs left to this file")
    parser.add_argument("--against", type=Path, help="compare with this recording")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        help="keep models, data and outputs in this folder, which is new",
    )
    parser.add_argument(
        "--resume_from", type=Path, help="resume from the outputs that --checkpoints kept there"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], choices=list(RUNS), help="these runs and what they need"
    )
    chosen = parser.parse_args()
    if chosen.resume_from and (not chosen.against or chosen.json or chosen.checkpoints):
        parser.error("--resume_from needs --against, and takes neither --json nor --checkpoints")
    if chosen.checkpoints and chosen.checkpoints.exists():
        parser.error(f"--checkpoints {chosen.checkpoints}: is there already; name a new folder")
    return chosen


def main() -> int:
    """Run, write and compare; 1 if something differs."""
    chosen = arguments()
    before = json.loads(chosen.against.read_text(encoding="utf-8")) if chosen.against else {}
    if before and before["machine"] != machine():
        print(f"recorded with {before['machine']}, compared with {machine()}")
    with tempfile.TemporaryDirectory(prefix="trajectories_") as temporary:
        work = (chosen.checkpoints or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        tree = Tree(chosen.tree.resolve(), work)
        if chosen.resume_from:
            names = [
                name
                for name in RUNS
                if RUNS[name].resumed and name in (chosen.only or before["runs"])
            ]
            if not names:
                sys.exit("none of these runs has checkpoints to resume from")
            found = list(resume(tree, chosen.resume_from.resolve(), names, before["runs"]))
        else:
            runs = record(tree, chosen_runs(chosen.only))
            if chosen.json:
                text = json.dumps({"machine": machine(), "runs": runs}, indent=1)
                chosen.json.write_text(text + "\n", encoding="utf-8")
            found = list(compare(runs, before["runs"])) if before else []
    if found:
        print(f"{len(found)} differences:", *found, sep="\n  ")
    elif before:
        print("no difference")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
