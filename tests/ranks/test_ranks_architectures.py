"""Every common architecture, tiny and random, under ZeRO-3 through SFT and PPO, and those with a
classifier or a loss of their own through the reward model too.

The runs share two launches: PPO without experts has one rank. `pytest --update-docs` writes what
they found to the table of docs/models.md; without the option that table is compared.
"""

import json
import math
import re
from itertools import combinations

import pytest
import torch
from every_architecture import ARCHITECTURES, save_model_of
from launch import ROOT, forked, metrics_of, succeed
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from workers.architectures import IDS, LENGTHS

from dschat_ppo.errors import UserError
from dschat_ppo.features.router.checks import router_top_k
from dschat_ppo.models.adapters.layers import lora_targets
from dschat_ppo.models.loading import load_sequence_classifier
from dschat_ppo.models.weight_headers import checkpoint_shapes
from dschat_ppo.tools import toy

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.release]

# transformers has no classifier, or one with another head, so plain transformers cannot load the
# reward model
BLANK = {"Llama 4 (text)", "LFM2", "Granite 4 (hybrid)", "Falcon-H1", "ELECTRA (decoder)"}
ROUTED = ("GPT-OSS", "Mixtral", "Qwen2-MoE", "Qwen3-MoE", "Qwen3-Next")  # with a router loss
# of attention and layers with a state
HYBRIDS = "LFM2", "Granite 4 (hybrid)", "Qwen3.5 (text)", "Falcon-H1"
MIXTURES = (*ROUTED, "Llama 4 (text)", "DeepSeek-V3")
# the critic of the others begins as the actor
REWARDED = *sorted(BLANK), "Mixtral", "Llama 3", "Mistral"
LENGTHS_PAY = f"--use_reward_model False --reward_function {ROOT}/tests/reward_functions.py:lengths"
COEF = 0.5
WORDS = ("red", "blue", "a lamp", "here", "yes", "no thanks", "in the hall", "red here")
FIT = (
    "--dtype fp32 --zero_stage 3 --per_device_train_batch_size 2 --learning_rate 0.003"
    " --max_seq_len 48"
)
PPO = (
    "--data_split 0,0,1 --dtype fp32 --actor_zero_stage 3 --critic_zero_stage 3"
    " --max_prompt_seq_len 32 --max_answer_seq_len 6 --per_device_generation_batch_size 2"
    " --per_device_training_batch_size 2 --num_warmup_steps 0 --actor_learning_rate 0.003"
    " --critic_learning_rate 0.003 --enable_test_mode --test_stop_step 1 --old_logprobs recompute"
)


WITHOUT = {"Llama 3": "pad_token", "Mistral": "eos_token"}  # what their tokenizers lack
DOCS = ROOT / "docs/models.md"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"


def stem(name: str) -> str:
    """Of the folder of an architecture."""
    return re.sub(r"\W+", "_", name)


def experts_of(model, ids) -> list[set[int]]:
    """The experts whose weights have a gradient, in each tensor of experts."""
    model.zero_grad()
    ids = torch.tensor([ids])
    model(input_ids=ids, labels=ids).loss.backward()
    tensors = [
        w.grad for name, w in model.named_parameters() if ".experts." in name and w.dim() == 3
    ]
    return [set(grad.abs().amax(dim=(1, 2)).nonzero().flatten().tolist()) for grad in tensors]


def rows_of_other_shapes() -> list[list[list[int]]]:
    """Two answers to a prompt for one rank, whose layers with a state run three blocks of rows, and
    two rows for the other, whose layers run one."""
    return [[[*range(50, 65)], [*range(50, 60), 99]], [[*range(70, 85)], [*range(90, 102)]]]


def rows_of_other_experts(folder) -> list[list[int]]:
    """Two rows of one token each, which use the most different experts."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    used = {token: experts_of(model, [token] * 6) for token in range(50, 60)}

    def difference(pair) -> int:
        return sum(len(a ^ b) for a, b in zip(*(used[token] for token in pair), strict=True))

    best = max(combinations(used, 2), key=difference)
    assert difference(best) > 0 or all(len(experts) == 4 for experts in used[best[0]]), (
        f"{folder}: the same experts"
    )
    return [[token] * 6 for token in best]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder with `base`, `sft`, `ppo`, and for some `reward`, of each architecture, and the
    worker's findings."""
    folder = tmp_path_factory.mktemp("architectures")
    tokenizer = toy.make_tokenizer(["a few words to merge"])
    both = [(f"Where is it{'?' * n}", f" {word}") for n, word in enumerate(WORDS)]
    rows = {
        "sft": [{"prompt": prompt, "response": answer} for prompt, answer in both],
        "pairs": [
            {"prompt": prompt, "chosen": answer, "rejected": f" not{answer}"}
            for prompt, answer in both
        ],
        "prompts": [{"prompt": prompt} for prompt, _ in both],
    }
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    runs, updates = {}, {}
    for name in ARCHITECTURES:
        home, router = folder / stem(name), f"--router_loss_coef {COEF}" if name in ROUTED else ""
        save_model_of(name, tokenizer, home / "base")
        if name in WITHOUT:
            file = home / "base/tokenizer_config.json"
            kept = {
                key: value
                for key, value in json.loads(file.read_text()).items()
                if key != WITHOUT[name]
            }
            file.write_text(json.dumps(kept))
        steps = {
            "sft": (
                f"--data_path {folder}/sft.jsonl --data_split 1,0,0 --model_name_or_path"
                f" {home}/base {FIT}"
            ),
            "reward": (
                f"--data_path {folder}/pairs.jsonl --data_split 0,1,0 --model_name_or_path"
                f" {home}/sft {FIT}"
            ),
            "ppo": (
                f"--data_path {folder}/prompts.jsonl --actor_model_name_or_path {home}/sft {PPO} "
                + (
                    f"--critic_model_name_or_path {home}/reward"
                    if name in REWARDED
                    else LENGTHS_PAY
                )
            ),
        }
        runs |= {
            f"{name}: {step}": (
                1 if step == "ppo" and name not in MIXTURES else 2,
                step,
                [*words.split(), *router.split(), "--output_dir", f"{home}/{step}"],
            )
            for step, words in steps.items()
            if step != "reward" or name in REWARDED
        }
        if name in MIXTURES:
            rows = [[row] for row in rows_of_other_experts(home / "base")]
            updates[stem(name)] = [str(home / "base"), rows, COEF if router else 0]
        elif name in HYBRIDS:
            updates[stem(name)] = [str(home / "base"), rows_of_other_shapes(), 0]
    # the ranks share rows, twice as many in a micro-batch
    ranks, step, words = runs["Mixtral: sft"]
    size = ["--sequence_parallel_size", "2", "--per_device_train_batch_size", "4"]
    runs["divided"] = (ranks, step, [*words, *size, "--output_dir", str(folder / "divided")])
    (folder / "cases.json").write_text(json.dumps({"runs": runs, "updates": updates}))
    for ranks in (2, 1):
        succeed(forked(ranks, "tests/workers/architectures.py", folder, timeout=900))
    return folder


@pytest.fixture(scope="module")
def logs(out):
    of_two, of_one = (json.loads((out / f"found_{ranks}.json").read_text()) for ranks in (2, 1))
    return of_two | of_one


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_losses_are_finite_generation_and_scoring_agree_and_weights_keep_their_names(out, name):
    for step in ("sft", "reward", "ppo") if name in REWARDED else ("sft", "ppo"):
        numbers = {
            key: value
            for line in metrics_of(out / stem(name) / step)
            for key, value in line.items()
        }
        wrong = [
            key
            for key, value in numbers.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        assert any("loss" in key for key in numbers) and not wrong
        assert any("grad_norm" in key and value > 0 for key, value in numbers.items())
        assert step != "ppo" or numbers["rollout/logprob_diff_max"] < 1e-4
        # it is 2 for a balanced load of 2 out of 4 experts, and at most 4
        router = [numbers[key] for key in ("router_loss", "policy/router_loss") if key in numbers]
        assert len(router) == (name in ROUTED) and all(1.5 < loss < 4 for loss in router)
    base, saved = (checkpoint_shapes(str(out / stem(name) / part)) for part in ("base", "sft"))
    assert saved == base


def test_ranks_that_share_rows_have_the_same_router_loss_and_updates(out):
    whole, divided = (
        [
            [line[key] for key in ("loss", "router_loss", "grad_norm")]
            for line in metrics_of(folder)
            if line["step"]
        ]
        for folder in (out / "Mixtral/sft", out / "divided")
    )
    torch.testing.assert_close(torch.tensor(divided), torch.tensor(whole), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("part", ["sft", "ppo/actor"])
def test_plain_transformers_computes_the_log_probs_that_the_run_ended_with(out, name, part):
    folder = out / stem(name) / part
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = []
    for row, length in zip(IDS, LENGTHS.tolist(), strict=True):
        logits = model.eval()(input_ids=row[None, :length]).logits[0, :-1].double()
        expected.append(logits.log_softmax(dim=-1).gather(1, row[1:length, None])[:, 0])
    torch.testing.assert_close(
        torch.load(folder / "outputs.pt").double(), torch.cat(expected), atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, "ppo/critic") for name in ARCHITECTURES),
        *((name, "reward") for name in REWARDED),
    ],
)
def test_plain_transformers_computes_the_values_that_the_run_ended_with(out, name, part):
    folder = out / stem(name) / part
    if name in BLANK:
        model = load_sequence_classifier(str(folder), "fp32", None, new_head=False)
    else:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, output_loading_info=True
        )
        assert (
            not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        )
    expected = [
        model.score(model.eval().base_model(input_ids=row[None, :length]).last_hidden_state[0])[
            :, 0
        ]
        for row, length in zip(IDS, LENGTHS.tolist(), strict=True)
    ]
    torch.testing.assert_close(
        torch.load(folder / "outputs.pt"), torch.cat(expected), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("name", [*MIXTURES, *HYBRIDS])
def test_ranks_with_other_experts_or_packed_states_make_the_update_of_one_process(out, name):
    base, rows, coef = json.loads((out / "cases.json").read_text())["updates"][stem(name)]
    model, loss = AutoModelForCausalLM.from_pretrained(base), 0.0
    rows = [torch.tensor([row]) for part in rows for row in part]
    for ids in rows:
        logits = model(input_ids=ids).logits[0, :-1]
        loss = loss + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    loss = loss / sum(ids.shape[1] - 1 for ids in rows)
    if coef:
        ids = torch.cat(rows)
        output = model(input_ids=ids, output_router_logits=True)
        # nothing reads the last states
        read = torch.ones_like(ids).index_fill(1, torch.tensor(ids.shape[1] - 1), 0)
        experts = model.num_experts, model.num_experts_per_tok
        loss = loss + coef * load_balancing_loss_func(output.router_logits, *experts, read)
    loss.backward()
    torch.optim.AdamW(model.parameters(), 1.0, (0.9, 0.95), 1.0, 0.0).step()
    found = load_file(out / f"{stem(name)}.updated")
    for key, weight in model.named_parameters():
        torch.testing.assert_close(found[key], weight.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("part", ["sft", "reward", "ppo/actor", "ppo/critic"])
def test_a_model_is_saved_with_the_eos_that_its_tokenizer_lacked_and_without_pad(out, logs, part):
    said = (
        "the tokenizer has no EOS token; answers end with <|end|>, the one of"
        " generation_config.json"
    )
    assert said in logs["Mistral: sft"] and "no EOS token" not in logs["Mistral: reward"]
    for name, pad, eos in (("Llama 3", None, 1), ("Mistral", 0, 1)):
        folder = out / stem(name) / part
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (pad, eos)
        if part in ("sft", "ppo/actor"):
            assert GenerationConfig.from_pretrained(folder).eos_token_id == eos


def row_of(name: str, logs: dict[str, str], folder) -> str:
    """What the runs of an architecture found, as a line of the table."""
    said = logs[f"{name}: ppo"]
    unfit = re.search(r"continuous batching does not fit \w+ \((.*)\); by", said)
    assert unfit or "continuous batching agrees with" in said
    padded = re.search(r": (.*), so rows are padded", logs[f"{name}: sft"])
    whole = "log-probs are computed from whole logits" in logs[f"{name}: sft"]
    packed = (
        f"no: {padded[1]}"
        if padded
        else "no: its output head needs whole logits"
        if whole
        else "yes"
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = list(dict.fromkeys(layer.rpartition(".")[2] for layer in lora_targets(model, None)))
    try:
        router_top_k(model.config, "")
        router = "yes"
    except UserError:
        router = "no"
    return " | ".join(
        [
            (
                f"| {name}"
                f" ({type(model).__name__.removesuffix('ForCausalLM').removesuffix('LMHeadModel')})"
            ),
            f"padded batches: {unfit[1]}" if unfit else "continuous batching",
            packed,
            ", ".join(f"`{layer}`" for layer in layers),
            f"{router if name in MIXTURES else '-'} |",
        ]
    )


def test_the_table_of_the_docs_is_what_the_runs_found(out, logs, request):
    head = (
        "| architecture | generation | packed rows | layers that get LoRA | router loss"
        " |\n|---|---|---|---|---|"
    )
    table = "\n".join(
        [head, *(row_of(name, logs, out / stem(name) / "base") for name in ARCHITECTURES)]
    )
    print(table)
    text = DOCS.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    written, after = rest.split(END)
    if request.config.getoption("--update-docs"):
        DOCS.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
        return
    assert written.strip() == table
