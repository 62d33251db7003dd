"""The pictures of README.md and docs/reading-curves.md: short runs of the toy tasks, some broken on
purpose.

    python benchmarks/curves.py [--work DIR] [--pictures docs/pictures]

Each run has two ranks and takes a minute or less. Finished runs are kept in the work folder. It
needs matplotlib: pip install -e '.[plot]'.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from learning import ROOT, call, points, prepare

MADE, TOY = "{work}/preference/made", "training_scripts/toy"  # MADE: by `prepare` of `learning.py`
QUICKSTART = f"{TOY}/run_step3_ppo.sh {MADE}/toy {MADE}/sft {MADE}/reward {{out}}"
# slower than the quickstart, so that more steps show how a run begins and how it goes on
PPO = (
    f"{QUICKSTART} --max_steps 32 --enable_test_mode True --test_stop_step 24 --eval_interval 4"
    " --reward_clip 5 --kl_coef 0.1 --whiten_advantages True --actor_learning_rate 1e-4"
    " --critic_learning_rate 2e-4"
)
GRPO = f"{TOY}/run_grpo_addition.sh {{work}}/addition --output_dir {{out}} --eval_interval 4"
LENGTH = f"""{PPO} --use_reward_model False --reward_function length:0.02 --advantage_estimator
grpo --kl_coef 0
    --n_samples_per_prompt 4 --per_device_generation_batch_size 16 --actor_learning_rate 5e-4"""

# run -> the command of its last step
RUNS = {
    "addition": GRPO,
    "learning rate 3e-2": f"{GRPO} --actor_learning_rate 3e-2",
    "learning rate 1e-7": f"{GRPO} --actor_learning_rate 1e-7",
    "constant reward": f"{GRPO} --reward_function format_match?pattern=.*",
    "no SFT": f"{GRPO} --actor_model_name_or_path {{work}}/addition/toy/model",
    "reward for length": LENGTH,
    "quickstart": QUICKSTART,
    "PPO": PPO,
    "no KL, high rate": f"{PPO} --kl_coef 0 --actor_learning_rate 1e-3",
    "critic does not learn": f"{PPO} --critic_learning_rate 1e-8",
}
# picture -> (its runs, its metrics)
PICTURES = {
    "quickstart": (["quickstart"], ["reward/score_mean", "eval/score", "kl/ref_k1"]),
    "healthy": (["PPO"], ["reward/score_mean", "kl/ref_k1", "value/explained_variance"]),
    "learning-rate": (
        ["addition", "learning rate 3e-2", "learning rate 1e-7"],
        ["reward/score_mean", "policy/entropy", "policy/clip_fraction"],
    ),
    "no-signal": (
        ["addition", "constant reward", "no SFT"],
        ["reward/score_mean", "reward/score_std", "reward/equal_groups_share"],
    ),
    "length": (
        ["reward for length"],
        ["reward/score_mean", "rollout/length_mean", "rollout/ended_share"],
    ),
    "no-kl": (
        ["PPO", "no KL, high rate"],
        ["reward/score_mean", "policy/entropy", "rollout/ended_share"],
    ),
    "critic": (
        ["PPO", "critic does not learn"],
        ["value/explained_variance", "value/loss", "reward/score_mean"],
    ),
}


def draw(work: Path, runs: list[str], metrics: list[str], file: Path) -> None:
    """One panel for each metric, with a line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.7), layout="constrained")
    for number, metric in enumerate(metrics, start=1):
        axes = figure.add_subplot(1, len(metrics), number)
        for run in runs:
            axes.plot(*points(work / "runs" / run.replace(" ", "_"), metric), label=run)
        if metric == "value/explained_variance":  # far below 0 where returns are nearly equal
            axes.set_ylim(-2, 1)
        axes.set_title(metric, fontsize="medium")
        axes.set_xlabel("PPO step", fontsize="small")
        axes.tick_params(labelsize="small")
        axes.grid(alpha=0.3)
        if number == 1 and len(runs) > 1:
            axes.legend(fontsize="small")
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "output/curves",
        help="folder for models and finished runs",
    )
    parser.add_argument(
        "--pictures", type=Path, default=ROOT / "docs/pictures", help="folder for the pictures"
    )
    chosen = parser.parse_args()
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        parser.error(
            "the pictures need matplotlib, which is not installed: pip install -e '.[plot]'"
        )
    work = chosen.work.resolve()
    prepare("preference", work)
    for name, command in RUNS.items():
        out = work / "runs" / name.replace(" ", "_")
        if not (out / "result.json").exists():
            words = [word.format(work=work, out=out) for word in command.split()]
            call(["bash", *words], out.with_name(f"{out.name}.log"))
    chosen.pictures.mkdir(parents=True, exist_ok=True)
    for name, (runs, metrics) in PICTURES.items():
        draw(work, runs, metrics, chosen.pictures / f"{name}.png")


if __name__ == "__main__":
    main()
