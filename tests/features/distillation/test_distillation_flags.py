"""What the flags of distillation alone decide: what is refused, models, weights and shares."""

import pytest

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.features.distillation.flags import DistillationFlags

OF_STEP = {
    "sft": "--model_name_or_path m --data_path d --output_dir o",
    "ppo": (
        "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
    ),
}
TAUGHT = "--teacher_model_name_or_path t"
ALONE = f"{TAUGHT} --advantage_estimator none --use_reward_model False"
CASES = [  # step, what is given, a part of the message
    ("ppo", f"--use_reward_model False {TAUGHT} --distill_policy_gradient", "or a teacher"),
    (
        "ppo",
        f"{ALONE} --policy_loss gspo",
        "--policy_loss gspo has no effect: it is for a policy loss, which",
    ),
    (
        "ppo",
        f"{ALONE} --kl_coef 0.1",
        "--kl_coef 0.1 has no effect: it is for advantages from rewards",
    ),
    (
        "ppo",
        f"{ALONE} --eval_data_path e",
        "a teacher gives no score to held-out answers; give --eval_reward_function",
    ),
    (
        "ppo",
        "--advantage_estimator none",
        "--advantage_estimator none has no policy loss; give a teacher",
    ),
    ("ppo", "--distill_on mix:2", "must be policy, data or mix:P with P from 0 to 1"),
    ("ppo", "--distill_policy_gradient", "it is for a teacher (--teacher_model_name_or_path)"),
    ("ppo", "--distill_coef 0.5", "it is for a teacher (--teacher_model_name_or_path)"),
    (
        "ppo",
        f"{TAUGHT} --distill_policy_gradient --distill_topk 9",
        "--distill_topk 9 has no effect: it is for the loss of a divergence, which"
        " --distill_policy_gradient replaces (omit that flag to have the loss); omit it",
    ),
    (
        "ppo",
        f"{TAUGHT} --distill_policy_gradient True --distill_loss jsd",
        "--distill_loss jsd has no effect: it is for the loss of a divergence, which"
        " --distill_policy_gradient replaces (omit that flag to have the loss); omit it",
    ),
    ("ppo", f"{TAUGHT} --distill_coef 0", "--distill_coef 0 leaves the teacher without effect"),
    (
        "ppo",
        f"{TAUGHT} --distill_on data",
        "--distill_on data: answers of the data are no samples of the policy",
    ),
    (
        "ppo",
        f"{TAUGHT} --offload_teacher_model --actor_zero_stage 2",
        "--offload_teacher_model needs --actor_zero_stage 3",
    ),
    ("sft", f"{TAUGHT} --offload_teacher_model", "--offload_teacher_model needs --zero_stage 3"),
    (
        "ppo",
        f"{TAUGHT} --sequence_parallel_size 2",
        "a divergence from a teacher needs whole rows on a rank",
    ),
    (
        "sft",
        f"{TAUGHT} --sequence_parallel_size 2",
        "a divergence from a teacher needs whole rows on a rank",
    ),
    ("sft", "--distill_topk 3", "it is for a teacher (--teacher_model_name_or_path)"),
    ("ppo", f"{TAUGHT} u", "of several teachers each needs SOURCE= in front"),
    (
        "sft",
        f"{TAUGHT} --distill_coef 1.5",
        "--distill_coef 1.5 is the share of the divergence in the loss",
    ),
    ("sft", "--teacher_model_name_or_path a=t", "step 1 takes one teacher, for all rows"),
]
WRONG = {
    "sft": "distill_coef=2 distill_coef=0 teacher_model_name_or_path= "
    "teacher_model_name_or_path=a=b",
    "ppo": "teacher_model_name_or_path= distill_on=mix:2 distill_on=some distill_coef=-1",
}


def config_of(step: str, *words: str):
    return parse(step, [*OF_STEP[step].split(), *words])


def flags_of(*words: str) -> DistillationFlags:
    return config_of("ppo", *words).of(DistillationFlags)


@pytest.mark.parametrize(("step", "given", "message"), CASES)
def test_flags_that_do_not_go_together_are_refused(step, given, message):
    with pytest.raises(UserError) as problem:
        config_of(step, *given.split())
    assert message in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("step", "case"), [(step, case) for step, text in WRONG.items() for case in text.split()]
)
def test_a_wrong_value_is_in_the_one_message(step, case):
    name, _, value = case.partition("=")
    with pytest.raises(UserError) as problem:
        config_of(step, f"--{name}", value, "--adam_beta1", "9", "--zz")
    lines = str(problem.value).splitlines()
    starts = [f"--{name}", "--adam_beta1", "unknown flag or value: --zz"]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)


def test_a_teacher_without_a_reward_is_answered_with_the_flags_that_learn_from_it_alone():
    words = "--teacher_model_name_or_path t --actor_model_name_or_path a --data_path d".split()
    for output in ([], ["--output_dir", "o"]):
        with pytest.raises(UserError, match="learn from the teacher alone"):
            parse("ppo", [*words, *output])
    words += ["--output_dir", "o"]
    alone = ["--use_reward_model", "False", "--advantage_estimator", "none"]
    assert parse("ppo", [*words, *alone]).of(DistillationFlags).distils


def test_teachers_their_divergence_and_their_answers():
    def config(*words: str):
        return config_of("ppo", "--teacher_model_name_or_path", *words)

    two = config("math,code=/t/a=1", "chat=b", "--distill_loss", "jsd", "--distill_beta", "1")
    flags = two.of(DistillationFlags)
    assert flags.teachers == [(("math", "code"), "/t/a=1"), (("chat",), "b")]
    assert flags.kind == "reverse_kl"
    assert [role for role in two.models if role.startswith("teacher")] == ["teacher", "teacher 2"]
    assert [model.label for model in two.further_models] == [
        "--teacher_model_name_or_path math code",
        "--teacher_model_name_or_path chat",
    ]
    assert flags.coef == flags.loss_coef == 1.0 and not flags.gives_advantages
    assert two.compares_distributions and two.algorithm.has_reference


def test_a_divergence_is_a_loss_or_in_the_advantages():
    words = "--distill_policy_gradient --distill_coef 0.3 --advantage_estimator none"
    config = config_of("ppo", *f"{TAUGHT} {words} --use_reward_model False".split())
    flags = config.of(DistillationFlags)
    assert (flags.coef, flags.loss_coef, flags.gives_advantages) == (0.3, 0.0, True)
    assert config.has_policy_loss and not config.compares_distributions


@pytest.mark.parametrize(("text", "share"), [("policy", 1.0), ("data", 0.0), ("mix:0.25", 0.25)])
def test_the_share_of_steps_whose_answers_are_sampled(text, share):
    config = config_of("ppo", *ALONE.split(), "--distill_on", text)
    assert config.of(DistillationFlags).sampled_share == share
    assert config.step_data.keeps_answers == (share < 1)


def test_the_reference_is_the_teacher_where_there_is_no_other():
    words = "--advantage_estimator none --use_reward_model False --teacher_prompt_column c"
    config = config_of("ppo", *words.split())
    assert config.has_reference and not config.algorithm.has_reference
    assert config.of(DistillationFlags).loss_coef == 1.0 and config.compares_distributions
    [column] = config.step_data.prompt_columns
    assert (column.name, column.identity) == ("teacher_prompt_ids", "c")
