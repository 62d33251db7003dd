"""Bad input: one clear message that names the culprit, and exit code 2 before any model is
loaded."""

import json
import shutil
import signal

import pytest
from launch import forked, succeed

# name -> (step, words; {a} is the assets folder, {b} the folder of bad files), words that the
# message must hold
CASES = {
    "missing file": ("sft", "--data_path {b}/nowhere.jsonl", ["--data_path", "nowhere.jsonl"]),
    "wrong column": (
        "reward",
        "--data_path {a}/sft.jsonl",
        ["sft.jsonl", "a prompt and two answers"],
    ),
    "empty data set": ("sft", "--data_path {b}/empty.jsonl", ["empty.jsonl", "empty"]),
    "unreadable ending": ("sft", "--data_path {b}/notes.pdf", ["notes.pdf", ".jsonl"]),
    "line that is not JSON": (
        "sft",
        "--data_path {b}/broken.jsonl --data_split 1,0,0",
        ["broken.jsonl", "row 2"],
    ),
    "model that does not exist": (
        "sft",
        "--model_name_or_path {b}/no_model",
        ["--model_name_or_path", "no_model"],
    ),
    "reward model of another tokenizer": (
        "ppo",
        "--critic_model_name_or_path {b}/other",
        ["tokenizer differs"],
    ),
    "statistics that the reward model lacks": (
        "ppo",
        "--normalize_rewards model",
        ["reward_mean", "step 2"],
    ),
    "held-out prompts that are all too long": (
        "ppo",
        "--eval_data_path {a}/prompts.jsonl --data_path {b}/short.jsonl --max_prompt_seq_len 1",
        ["--eval_data_path", "--max_prompt_seq_len"],
    ),
    "batches that do not divide": (
        "ppo",
        "--per_device_generation_batch_size 6 --per_device_training_batch_size 4",
        [
            "6 x --generation_batches 1 x --n_samples_per_prompt 1 = 6",
            "4 x --gradient_accumulation_steps 1 = 4",
            "Set --generation_batches 2",
        ],
    ),
    "LoRA of layers that do not exist": (
        "sft",
        "--lora_dim 4 --lora_module_name decoder.layers.",
        ["--lora_module_name decoder.layers.", "give layers."],
    ),
    "deepspeed settings of ours": (
        "sft",
        "--deepspeed_config {b}/ds.json",
        ["ds.json", "train_batch_size"],
    ),
    "output that cannot be made": (
        "sft",
        "--output_dir {b}/notes.txt/out",
        ["--output_dir", "cannot be written"],
    ),
    "critic without a trained head": (
        "ppo",
        "--critic_model_name_or_path {a}/lm",
        ["--critic_model_name_or_path", "no trained scalar head"],
    ),
    "limit that cuts every answer": (
        "sft",
        "--max_seq_len 2",
        ["every answer is cut", "--max_seq_len 2"],
    ),
    "answers beyond all positions": (
        "ppo",
        "--max_answer_seq_len 1000000",
        ["--max_answer_seq_len", "128 positions"],
    ),
    "critic that is an encoder": (
        "ppo",
        "--critic_model_name_or_path {b}/encoder",
        ["--critic_model_name_or_path", "BertConfig without is_decoder is an encoder"],
    ),
    "swapped models": (
        "ppo",
        "--actor_model_name_or_path {a}/reward --critic_model_name_or_path {a}/lm",
        ["--actor_model_name_or_path", "score.weight", "swapped"],
    ),
    "chat template that refuses system turns": (
        "sft",
        "--model_name_or_path {b}/strict --data_path {b}/system.jsonl --data_split 1,0,0",
        ["system.jsonl, row 2", "System role not supported"],
    ),
    "lines of null, which crash pyarrow": (
        "sft",
        "--data_path {b}/nulls.jsonl",
        ["nulls.jsonl", "row 1"],
    ),
    "tokenizer that is none": (
        "sft",
        "--model_name_or_path {b}/no_tokenizer",
        ["no_tokenizer", "one that cannot be loaded"],
    ),
    "model of ten trillion weights": (
        "sft",
        "--model_name_or_path {b}/huge",
        ["--model_name_or_path", "wrong shape"],
    ),
    "home of nobody": (
        "sft",
        "--data_path ~nobody_at_all/x",
        ["--data_path ~nobody_at_all/x", "no such file"],
    ),
    "no reward at all": (
        "ppo",
        "--use_reward_model False",
        ["give --reward_function, --remote_reward_url"],
    ),
    "trace of a step that does not come": (
        "sft",
        "--profile 99999",
        ["--profile 99999", "name one of them"],
    ),
    "value that is no choice": (
        "ppo",
        "--advantage_estimator gae2",
        ["--advantage_estimator", "did you mean gae?", "grpo_pass_at_k"],
    ),
}


def base_words(step: str, assets, out) -> list[str]:
    """A command line that would run."""
    if step == "ppo":
        words = (
            f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward"
        )
        words += f" --data_path {assets}/prompts.jsonl"
    else:
        words = (
            f"--model_name_or_path {assets}/lm --data_path"
            f" {assets}/{'sft' if step == 'sft' else 'pairs'}.jsonl"
        )
    return [*words.split(), "--output_dir", str(out)]


@pytest.fixture(scope="module")
def bad(assets, tmp_path_factory):
    """Folder of files that are wrong in one way each."""
    from conftest import tiny_config
    from transformers import AutoTokenizer, BertConfig, LlamaForSequenceClassification

    from dschat_ppo.tools import toy

    folder = tmp_path_factory.mktemp("bad")
    good = json.dumps({"prompt": "a:", "response": "b"})
    (folder / "empty.jsonl").write_text("")
    (folder / "notes.txt").write_text("hello")
    (folder / "notes.pdf").write_text("hello")
    (folder / "broken.jsonl").write_text(f"{good}\n{{prompt\n")
    (folder / "short.jsonl").write_text('{"prompt": "a"}\n' * 64)
    (folder / "ds.json").write_text('{"train_batch_size": 4}')
    (folder / "nulls.jsonl").write_text("null\n" * 50)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    system = [{"role": "system", "content": "s"}, *turns]
    (folder / "system.jsonl").write_text(
        "".join(json.dumps({"messages": row}) + "\n" for row in (turns, system))
    )
    for name, settings in {
        "strict": {},
        "no_tokenizer": {},
        "huge": {"vocab_size": 4 * 10**7, "hidden_size": 2**18},
    }.items():
        shutil.copytree(assets / "lm", folder / name)
        config = json.loads((folder / name / "config.json").read_text()) | settings
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "strict/chat_template.jinja").write_text(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not"
        " supported') }}{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    )
    (folder / "no_tokenizer/tokenizer.json").write_text('{"model": 7}')
    BertConfig(num_labels=1).save_pretrained(folder / "encoder")  # a configuration without weights
    AutoTokenizer.from_pretrained(assets / "lm").save_pretrained(folder / "encoder")
    LlamaForSequenceClassification(tiny_config(num_labels=1)).save_pretrained(folder / "other")
    toy.make_tokenizer(["entirely different words, merged"] * 3).save_pretrained(folder / "other")
    return folder


@pytest.fixture(scope="module")
def said(assets, bad, tmp_path_factory):
    """Case -> [exit code, the lines of output from `error:` on]."""
    out = tmp_path_factory.mktemp("said")
    cases = {}
    for number, (name, (step, words, _)) in enumerate(CASES.items()):
        extra = words.format(a=assets, b=bad).split()
        cases[name] = [step, [*base_words(step, assets, out / str(number)), *extra]]
    (out / "cases.json").write_text(json.dumps(cases))
    succeed(forked(1, "tests/workers/bad_input.py", out / "cases.json", out / "said.json"))
    return json.loads((out / "said.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bad_input_gives_one_message_and_exit_code_2(said, name):
    code, lines = said[name]
    assert code == 2
    assert all(line.startswith("  --") for line in lines[1:]), "hints to flags, one per line"
    for word in CASES[name][2]:
        assert word in "\n".join(lines), lines


@pytest.mark.ranks
@pytest.mark.slow
def test_of_two_ranks_the_message_is_printed_once_and_the_exit_code_is_2(assets, tmp_path):
    words = [
        *base_words("sft", assets, tmp_path / "out"),
        "--data_path",
        tmp_path / "nowhere.jsonl",
    ]
    result = forked(2, "training/step1_sft/main.py", *words, end=signal.SIGTERM)
    assert result.returncode == 2
    printed = (result.stdout + result.stderr).splitlines()
    assert (
        len([line for line in printed if line.startswith("error: ") and "nowhere.jsonl" in line])
        == 1
    )
    assert not any("Traceback" in line for line in printed)
