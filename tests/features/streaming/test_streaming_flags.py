"""What the flags of a stream alone decide."""

import pytest
from command_lines import config_of
from planned_runs import sft

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError
from dschat_ppo.planner.plan_step import supervised_batch
from dschat_ppo.supervised.train_preference import ppo_words

STREAM = "--streaming --streaming_rows 9"


@pytest.mark.parametrize(
    ("step", "words", "message"),
    [
        ("sft", "--streaming", "--streaming and --streaming_rows need each other"),
        ("sft", "--streaming_rows 9", "--streaming and --streaming_rows need each other"),
        ("sft", f"--packing {STREAM}", "--packing needs the length of every training row"),
        ("reward", f"--packing {STREAM}", "--packing needs the length of every training row"),
        (
            "reward",
            f"--objective dpo {STREAM}",
            "--objective dpo computes log-probs of the reference",
        ),
        (
            "reward",
            f"--objective kto {STREAM}",
            "--objective kto computes log-probs of the reference",
        ),
        ("ppo", f"--sampler own.py:Hard {STREAM}", "--sampler chooses among all prompts"),
    ],
)
def test_flags_that_need_all_rows_are_refused(step, words, message):
    with pytest.raises(UserError, match=message):
        config_of(step, *words.split())


def test_a_micro_batch_of_a_stream_runs_in_one_pass_on_a_cpu():
    words = "--per_device_train_batch_size 16 --gradient_accumulation_steps 2 --max_seq_len 512 "
    assert supervised_batch(sft(words + STREAM), 1, on_gpu=False) == (16 * 512, 2)


def test_the_command_of_step_3_streams_as_step_2_did(tmp_path):
    config = config_of("reward", *STREAM.split(), "--output_dir", str(tmp_path / "reward"))
    words = ppo_words(config, "lm", "reward")
    assert [word for word in words if "streaming" in word] == [
        "--streaming=True",
        "--streaming_rows=9",
    ]
    assert parse("ppo", words).step_data.lazy.words == config.step_data.lazy.words
