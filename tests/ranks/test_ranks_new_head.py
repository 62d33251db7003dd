"""A model without a classifier class in transformers, and with fewer rows than its tokenizer has tokens, through all
three steps on two ZeRO-3 ranks."""

import json

import pytest
import torch
from launch import metrics_of, run_resumes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, GraniteForCausalLM

from dschat_ppo.models.loading import load_sequence_classifier
from dschat_ppo.tools.text_scorer import TextScorer

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ADDED = ["<tool>", "</tool>", "<note>"]
FIT = "--dtype fp32 --zero_stage 3 --per_device_train_batch_size 4 --learning_rate 0.01 --max_seq_len 48"
PPO = (
    "--data_split 0,0,1 --dtype fp32 --actor_zero_stage 3 --critic_zero_stage 3 --max_prompt_seq_len 32 "
    "--max_answer_seq_len 6 --per_device_generation_batch_size 2 --n_samples_per_prompt 2 "
    "--per_device_training_batch_size 4 --num_warmup_steps 0 --actor_learning_rate 0.003 --enable_test_mode "
    "--test_stop_step 2"
)
FUNCTIONS = """
def lengths(prompts, responses, **columns):
    return list(map(len, responses))

def later(prompts, responses, **columns):  # so that each evaluation is the best so far
    with open(__file__ + ".calls", "a") as calls:
        calls.write("x" * len(responses))
        return [calls.tell()] * len(responses)
"""


@pytest.fixture(scope="module")
def base(assets):
    """`assets/granite`: a language model with a row for each token but the three that were added last."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    known = len(tokenizer)
    tokenizer.add_tokens(ADDED)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "eos_token_id": 1}
    more["tie_word_embeddings"] = True
    GraniteForCausalLM(GraniteConfig(**sizes, **more, vocab_size=known)).save_pretrained(assets / "granite")
    tokenizer.save_pretrained(assets / "granite")
    (assets / "granite.py").write_text(FUNCTIONS)
    return assets / "granite", known


@pytest.fixture(scope="module")
def out(assets, base, tmp_path_factory):
    """Folders `sft` (stopped and resumed), `reward`, `ppo`, `cut` (as `ppo`, but stopped and resumed) and `resized`
    (step 3 on the base itself)."""
    folder = tmp_path_factory.mktemp("granite")
    pairs = f"--data_path {assets}/pairs.jsonl --data_split 0,1,0"
    prompts = f"--data_path {assets}/prompts.jsonl --eval_data_path {assets}/prompts.jsonl --eval_max_prompts 4"
    prompts += f" --eval_reward_function {base[0]}.py:later"
    sft = f"--data_path {assets}/sft.jsonl --data_split 1,0,0 --model_name_or_path {base[0]} --resize_vocabulary {FIT}"
    models = f"--actor_model_name_or_path {folder}/sft --critic_model_name_or_path {folder}/reward"
    rule = f"--use_reward_model False --reward_function {base[0]}.py:lengths --actor_model_name_or_path {base[0]}"
    cases = {
        "sft": ("sft", sft, [2], True),
        "reward": ("reward", f"{pairs} --model_name_or_path {folder}/sft {FIT}", [], True),
        "ppo": ("ppo", f"{PPO} {prompts} {models}", [], True),
        "cut": ("ppo", f"{PPO} {prompts} {models}", [3], True),
        "resized": ("ppo", f"{PPO} {prompts} {rule} --resize_vocabulary", [], True),
    }
    words = {
        name: (step, [*flags.split(), "--output_dir", f"{folder}/{name}"], stops, end)
        for name, (step, flags, stops, end) in cases.items()
    }
    found = run_resumes(words, folder)
    assert [starts[-1]["ended"] for starts in found.values()] == ["done"] * len(cases)
    return folder


def test_step_1_adds_rows_and_saves_them(out, base):
    folder, known = base
    for path in (out / "sft", out / "resized/actor"):
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not info["missing_keys"] and not info["mismatched_keys"]
        assert model.config.vocab_size == len(model.lm_head.weight) == known + len(ADDED)
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == known


def test_actor_and_reference_get_the_same_rows(out):
    first = next(line for line in metrics_of(out / "resized") if line["step"] == 1)
    assert abs(first["kl/ref_k1"]) < 1e-6


def test_the_reward_model_is_saved_with_this_projects_head(out):
    config = json.loads((out / "reward/config.json").read_text())
    assert config["architectures"] == ["GraniteWithScalarHead"]
    weights = load_file(out / "reward/model.safetensors")
    assert weights["score.weight"].shape == (1, 32)
    assert not any(name.startswith("lm_head") for name in weights)


def test_a_resumed_run_ends_at_the_same_weights(out):
    for part in ("actor", "critic"):
        whole, cut = (load_file(out / run / part / "model.safetensors") for run in ("ppo", "cut"))
        assert set(whole) == set(cut)
        assert all(torch.equal(whole[name], cut[name]) for name in whole)


@torch.no_grad()
def test_reward_model_and_best_critic_serve_scores(out):
    for folder in (out / "reward", out / "ppo/best/critic"):
        scorer = TextScorer(str(folder), "fp32", 60)
        scores = scorer(["a lamp in the hall", "red"])
        model = load_sequence_classifier(str(folder), "fp32", None, new_head=False).eval()
        for text, score in zip(["a lamp in the hall", "red"], scores, strict=True):
            ids = torch.tensor([[*scorer.tokenizer.encode(text), scorer.tokenizer.eos_token_id]])
            state = model.base_model(ids).last_hidden_state[0, -1]
            assert score == pytest.approx(float(model.score(state)), abs=1e-4)
