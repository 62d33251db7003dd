"""`dschat-explain` and the fold-out of the report, on records that are written by hand."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from report_runs import SAMPLE, ppo_lines, write_run
from safetensors import safe_open
from safetensors.numpy import save_file

from dschat_ppo.algorithms.advantage_estimators import ESTIMATORS
from dschat_ppo.features.explain import report_parts
from dschat_ppo.features.explain.explained_tokens import explained_tokens
from dschat_ppo.features.explain.programs import explain_main as main
from dschat_ppo.features.explain.record_files import encoded_texts, read_step
from dschat_ppo.features.explain.sentences import SENTENCES, advantage_sentence
from dschat_ppo.html_report.page import write_report

FLAGS = {
    "actor_model_name_or_path": "m",
    "advantage_estimator": "gae",
    "policy_loss": "ppo",
    "gamma": 1.0,
    "gae_lambda": 0.95,
    "whiten_advantages": True,
    "normalize_group_std": True,
    "group_std": "group",
    "clip_eps": 0.2,
    "clip_eps_low": None,
    "clip_eps_high": None,
    "ppo_epochs": 1,
    "record_rows": "samples",
}
PIECES = ["17", " <b>", "[42]", "⟨im_end⟩"]


def write_record(folder: Path, step: int = 1, pieces=PIECES, thinks: bool = False, **flags) -> Path:
    """A record of one row of four tokens, of which the third is an observation, and the others have
    ratios of 1, 2 and 1; it is one of a group with the scores 1, 0, 0, 0."""
    chosen = np.array([True, True, False, True])
    log_ratio = np.array([0.0, np.log(2.0), 0.0, 0.0])
    tensors = {
        "response_lengths": np.array([4]),
        "prompt_lengths": np.array([2]),
        "rows.row_indices": np.array([3]),
        "rows.groups": np.array([0]),
        "rows.scores": np.array([6.0]),
        "rows.penalised_scores": np.array([1.0]),
        "rows.source_scores": np.array([[6.0]]),
        "rows.finish_reason": np.array([0]),
        "rows.has_score": np.array([True]),
        "tokens.chosen": chosen,
        "tokens.loss_mask": chosen,
        "tokens.old_logprobs": np.zeros(4),
        "tokens.rewards": np.array([0.0, 0.0, 0.0, 0.98]),
        "tokens.kl": np.array([0.0, 0.0, 0.0, 0.4]),
        "tokens.advantages": np.array([0.8, -0.4, 0.0, 0.02]),
        "tokens.loss_weights": np.ones(4),
        "tokens.update_0.logprobs": log_ratio,
        "tokens.update_0.entropies": np.array([0.4, 1.9, 0.0, 0.02]),
        "tokens.update_0.clipped": np.array([0.0, 1.0, 0.0, 0.0]),
        "tokens.update_0.losses": np.array([-0.8, 0.48, 0.0, -0.02]),
        "tokens.update_0.trained": chosen.astype(float),
        **encoded_texts("prompt_pieces", [["What is", " 17?"]]),
        **encoded_texts("response_pieces", [pieces]),
    }
    header = {
        "form": 1,
        "step": step,
        "row_count": 4,
        "samples": [3],
        "flags": {**FLAGS, **flags},
        "sources": ["exact_match"],
        "groups": {"0": {"scores": [1.0, 0.0, 0.0, 0.0], "reward_sums": [0.98, 0.0, 0.0, 0.0]}},
        "constants": {
            "kl_coef": 0.05,
            "aggregation": "token_mean",
            "updates": [
                {"denominators": {"tokens": 10, "rows": 4, "constant": 40}, "entropy_coef": 0.0}
            ],
            "whitening": {"tokens": 10, "mean": 0.11, "std": 0.42},
        },
    }
    path = folder / f"record/step_{step:06d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"record": json.dumps(header)})
    return path


def shown(capsys, *words) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_a_row_by_hand(tmp_path, capsys):
    write_record(tmp_path)
    lines = shown(capsys, tmp_path, "--step", 1, "--row", 3).splitlines()
    assert lines[0].split("  ")[0] == "PPO step 1, row 3 of 4"
    assert "answer    17| <b>|[42]|⟨im_end⟩" in lines
    table = {line.split()[0]: line for line in lines[5:9]}
    # -0.8 / 10 tokens
    assert table["0"].split()[1:] == (
        "17 +0.800 - - 1.000 . 0.0000 0.40 +0.000 loss -0.0800, of 10 tokens".split()
    )
    assert table["1"].endswith("clipped at 1.20: no gradient") and " 2.000     C" in table["1"]
    assert table["2"].endswith("observation of 1 token: not trained")
    # the penalty of the last token is 0.05 x 0.4
    assert table["3"].endswith(
        "score 6.000, after scaling, clipping and penalties 1.000, KL -0.0200"
    )
    assert "whitened over 10 tokens (mean 0.110, deviation 0.420)" in lines[9]
    some = shown(capsys, tmp_path, "--step", 1, "--row", 3, "--tokens", "3:")
    assert "⟨im_end⟩ " in some and "clipped at 1.20" not in some


def test_grpo_says_its_numbers(tmp_path, capsys):
    """The scores 1, 0, 0, 0 have the mean 1/4 and the deviation 1/2."""
    write_record(tmp_path, advantage_estimator="grpo")
    text = shown(capsys, tmp_path, "--step", 1, "--row", 3)
    assert "grpo: (1.000 - 0.250) / (0.500 + 1e-06), less the KL penalty" in text
    assert "the 4 scores of the group are 1 0 0 0" in text


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_each_estimator_has_a_sentence(tmp_path, estimator):
    step = read_step(write_record(tmp_path, advantage_estimator=estimator))
    step.rows[0].of_row["baselines"] = 0.25
    sentence = advantage_sentence(step.rows[0], step)
    assert sentence.startswith(f"{estimator}: ") and len(sentence) > len(estimator) + 5
    assert set(SENTENCES) == set(ESTIMATORS)


def test_rloo_compares_with_the_others(tmp_path):
    step = read_step(write_record(tmp_path, advantage_estimator="rloo"))
    assert "0.980 - 0.000, the mean of the others" in advantage_sentence(step.rows[0], step)


@pytest.mark.parametrize(
    ("pieces", "inside"),
    [
        (["<think>", "a", "</think>", "b"], [True, True, True, False]),
        (["a", "</thi", "nk>", "b"], [True, True, True, False]),
        (["a", "⟨think⟩", "b", "c"], [False, True, True, True]),
        (["a", "b", "c", "d"], [False] * 4),
    ],
)
def test_thoughts_are_folded(tmp_path, capsys, pieces, inside):
    step = read_step(write_record(tmp_path, pieces=pieces))
    assert [token.is_thought for token in explained_tokens(step.rows[0], step, 0)] == inside
    folded = shown(capsys, tmp_path, "--step", 1, "--row", 3)
    opened = shown(capsys, tmp_path, "--step", 1, "--row", 3, "--thoughts")
    assert ("--thoughts shows them" in folded) == any(inside)
    assert "--thoughts shows them" not in opened


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "13"], "record has no step 13; recorded: 1, 2"),
        (["--step", "1", "--row", "9"], "--row 9: step 1 has the recorded rows 3"),
        (
            ["--step", "1", "--row", "3", "--update", "2"],
            "--update 2: the row is in 1 update",
        ),
        (["--step", "1", "--row", "3", "--tokens", "a"], "--tokens a: expected FROM:TO"),
    ],
)
def test_what_is_not_recorded_is_one_line(tmp_path, capsys, words, message):
    for step in (1, 2):
        write_record(tmp_path, step)
    assert main([str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_name_or_path": "m"}, "is a run of step 1 or 2; explain shows answers of step 3"),
        ({**FLAGS, "record_rows": "none"}, "was trained with --record_rows none"),
        (FLAGS, "has no PPO step yet"),
        (None, "is not the output folder of a run"),
    ],
)
def test_runs_without_a_record_say_why(tmp_path, capsys, config, message):
    if config is not None:
        (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read_are_named(tmp_path, capsys):
    path = write_record(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    assert main([str(tmp_path), "--step", "1"]) == 2
    assert f"{path}: is damaged" in capsys.readouterr().err
    path.write_bytes(content.replace(b'\\"form\\": 1', b'\\"form\\": 2'))
    assert main([str(tmp_path), "--step", "1"]) == 2
    assert "is of a later version of this project" in capsys.readouterr().err


def test_texts_are_no_markup(tmp_path, capsys):
    write_record(tmp_path)
    page = tmp_path / "page.html"
    shown(capsys, tmp_path, "--step", 1, "--html", page)
    text = page.read_text()
    assert "<b>" not in text and " &lt;b&gt;</span>" in text
    assert 'class="observed"' in text and 'class="token s2 clipped"' in text


def test_a_report_has_the_tokens_of_its_samples(tmp_path):
    """The shades of the advantages 0.8, -0.4 and 0.02 are 8, 2 and 4, of 0 to 8."""
    run = write_run(tmp_path / "run", ppo_lines(2), FLAGS, samples=[SAMPLE, {**SAMPLE, "step": 2}])
    write_record(run, 2)
    write_report([run], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count('<details class="tokens"') == 1
    for shade, piece in ((8, "17"), (2, " &lt;b&gt;"), (4, "⟨im_end⟩")):
        element = text[: text.index(f">{piece}</span>")].rsplit("<span", 1)[1]
        assert f'data-shades="{shade} ' in element


def test_a_row_without_a_chosen_token_is_shown_as_an_observation(tmp_path, capsys):
    """An episode whose environment ended before the model's first token."""
    path = write_record(tmp_path)
    with safe_open(path, "numpy") as file:
        names = list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names}
        metadata = file.metadata()
    nothing = np.zeros(4, dtype=bool)
    tensors["tokens.chosen"] = tensors["tokens.loss_mask"] = nothing
    tensors["tokens.update_0.trained"] = np.zeros(4)
    save_file(tensors, path, metadata)
    text = shown(capsys, tmp_path, "--step", 1, "--row", 3)
    assert "observation of 4 tokens: not trained" in text
    shown(capsys, tmp_path, "--step", 1, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="observed"') == 4 and "<select" not in page


def test_the_prompt_of_a_later_context_is_named(tmp_path, capsys):
    """The third token is what a second conversation begins with; a thought ends before it."""
    path = write_record(tmp_path, pieces=["17", " <think>", "again:", "b"])
    with safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tensors["tokens.contexts"] = np.array([0, 0, 1, 1], dtype=np.int16)
    save_file(tensors, path, metadata)
    text = shown(capsys, tmp_path, "--step", 1, "--row", 3)
    assert "prompt of context 2, 1 token: not trained" in text and "observation" not in text
    assert "thought of 1 token" in text and "score 6.000" in text
    shown(capsys, tmp_path, "--step", 1, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert '<span class="observed" title="prompt of context 2: not trained">again:</span>' in page


def test_the_first_and_the_newest_steps_stay_in_a_report(tmp_path, monkeypatch):
    for step in range(1, 6):
        write_record(tmp_path, step)
    monkeypatch.setattr(report_parts, "MOST_ANSWERS", 3)
    assert sorted(report_parts.fold_outs_of(tmp_path, [1, 2, 3, 4, 5])) == [1, 4, 5]


def test_explaining_imports_no_torch(tmp_path):
    write_record(tmp_path)
    code = (
        "import sys; from dschat_ppo.features.explain.programs import explain_main;"
        f" explain_main([{str(tmp_path)!r}, '--step', '1', '--row', '3']);"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
