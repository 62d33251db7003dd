"""Flags of the schedule, the length and the reference: what is refused, what has no effect, and the warm-up."""

import pytest
from command_lines import NEEDED

from dschat_ppo.config.cli import notes, parse
from dschat_ppo.config.schedule_flags import ScheduleFlags

NO_KL = "--kl_coef 0"
GRPO = "--advantage_estimator grpo --n_samples_per_prompt 2 --kl_coef 0.1"


@pytest.mark.parametrize(
    ("ratio", "number", "total", "steps"),
    [(0.0, 7, 100, 7), (0.1, 0, 30, 3), (0.1, 0, 31, 4), (0.07, 100, 100, 7), (0.03, 100, 7, 1), (0.5, 0, 1, 1)],
)
def test_the_ratio_is_rounded_up_and_replaces_the_number(ratio, number, total, steps):
    flags = ScheduleFlags(warmup_ratio=ratio)
    assert flags.warmup_steps("cosine", number, total) == steps
    assert flags.warmup_steps("constant", number, total) == 0


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("sft", "--warmup_ratio 0.1"),
        ("ppo", "--warmup_ratio 0.1"),
        ("ppo", "--warmup_ratio 0.1 --num_warmup_steps 100"),  # its default, as a resolved configuration has it
        ("sft", "--warmup_ratio 0 --num_warmup_steps 5"),
        ("sft", "--lr_scheduler_type polynomial --learning_rate 1e-7 --min_lr_ratio 0.1"),
        ("ppo", "--ref_model_name_or_path r --ref_sync_interval 2 --ref_sync_mixup 0.6"),
        ("ppo", f"{GRPO} --min_lr_ratio 0.1"),
    ],
)
def test_what_has_an_effect_is_accepted_without_a_note(step, words):
    assert notes(step, parse(step, [*NEEDED[step], *words.split()])) == []


@pytest.mark.parametrize("step", NEEDED)
def test_flags_without_effect_have_a_note(step):
    def noted(words: str) -> list[str]:
        return [line.split(":")[0] for line in notes(step, parse(step, [*NEEDED[step], *words.split()]))]

    assert noted("--max_steps 9 --num_train_epochs 2") == ["--num_train_epochs has no effect"]
    assert noted("--max_steps 9 --num_train_epochs 1") == noted("--num_train_epochs 0.5") == []
    assert noted("--lr_scheduler_type constant --num_warmup_steps 7") == ["--num_warmup_steps has no effect"]
    assert noted("--lr_scheduler_type constant") == noted("--lr_scheduler_type constant --num_warmup_steps 0") == []


def test_the_reference_has_the_actors_folder_or_its_own():
    for words, folder in (("", "a"), ("--ref_model_name_or_path r", "r"), (NO_KL, None)):
        assert parse("ppo", [*NEEDED["ppo"], *words.split()]).reference_folder == folder
