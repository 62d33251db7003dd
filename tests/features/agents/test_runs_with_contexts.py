"""Whole runs of step 3 whose episodes have one or two contexts: exact resume inside a PPO step, and
what the record of a run explains."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_ppo import EVERYTHING, PlainRun, started, stopped
from transformers import LlamaForCausalLM

from dschat_ppo.features.agents.played import PlayedEpisode, rows_of_played
from dschat_ppo.features.agents.record import ContextTokens
from dschat_ppo.features.explain.algorithm_program import algorithm_program
from dschat_ppo.features.explain.programs import explain_main
from dschat_ppo.features.explain.record_files import read_step, recorded_steps
from dschat_ppo.ppo.rollout_sampler import RolloutSampler
from dschat_ppo.types import PromptBatch

ALL = "--record_rows all"


def context_of(rollout, row):
    """A row, as a context of an episode."""
    length = int(rollout.response_lengths[row])
    columns = (rollout.response_ids, rollout.response_mask, rollout.rollout_logprobs)
    prompt_ids = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
    return ContextTokens(prompt_ids, *(column[row, :length].tolist() for column in columns), [])


@pytest.fixture(autouse=True)
def two_contexts(monkeypatch):
    """Every other row of a rollout is an episode that asks its prompt twice."""
    sample_once = RolloutSampler.sample

    def sample(sampler, indices, *path, **options):
        options = {"step": path[0], **options}
        first = sample_once(sampler, indices, *path, **options)
        again = sample_once(sampler, indices, *path, 9, **options)
        played = []
        for row in range(len(first.prompt_ids)):
            rollouts = (first, again)[: 1 + row % 2]
            contexts = [context_of(rollout, row) for rollout in rollouts]
            reason = int(rollouts[-1].finish_reason[row])
            played.append(PlayedEpisode(contexts, reason, None, "", [], {}))
        return rows_of_played(played, PromptBatch(first.prompt_ids, first.prompt_mask))

    monkeypatch.setattr(RolloutSampler, "sample", sample)


@pytest.mark.parametrize("at", [(1, 2), pytest.param((2, 0), marks=pytest.mark.release)])
def test_a_stopped_and_resumed_run_is_the_whole_run(assets, tmp_path, at):
    words = f"{EVERYTHING} {ALL}"
    run, checkpointer, did = started(assets, tmp_path / "whole", words)
    whole = (run, did, run.run(checkpointer))
    _, _, after, require_equal = stopped(assets, tmp_path, words, position=at)
    require_equal(whole)
    for step, path in recorded_steps(run.folder).items():
        assert path.read_bytes() == recorded_steps(after.folder)[step].read_bytes()


def test_the_record_is_of_each_context_alone(assets, tmp_path, monkeypatch, capsys):
    """Log-probs of the first update; `dschat-algorithm` and `dschat-explain` read the record."""
    run = PlainRun(assets, tmp_path / "run", ALL)
    run.run()
    path = recorded_steps(run.folder)[1]
    model = LlamaForCausalLM.from_pretrained(assets / "lm").eval()
    tokenizer = run.ppo.collection.requests.tokenizer
    numbers_of_contexts = set()
    for row in read_step(path).rows:
        contexts, ids = row.tokens["contexts"], row.tokens["response_ids"]
        numbers_of_contexts.add(tuple(np.unique(contexts)))
        prompt = tokenizer("".join(row.prompt), add_special_tokens=False)["input_ids"]
        for context in np.unique(contexts):
            tokens = ids[contexts == context].tolist()
            if context == 0:
                tokens = prompt + tokens
            chosen = row.tokens["chosen"][contexts == context]
            before = len(tokens) - chosen.sum()  # a prompt, then chosen tokens alone
            with torch.no_grad():
                table = model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
            expected = [table[at - 1, tokens[at]].item() for at in range(before, len(tokens))]
            found = row.tokens["old_logprobs"][contexts == context][chosen]
            np.testing.assert_allclose(found, expected, atol=1e-5)
    assert numbers_of_contexts == {(0,), (0, 1)}

    names = {"__name__": "program"}
    monkeypatch.setitem(sys.modules, "program", SimpleNamespace())
    exec(compile(algorithm_program(run.config), "step.py", "exec"), names)
    assert names["compare_step"](str(path)), capsys.readouterr().out
    capsys.readouterr()
    assert explain_main([str(run.folder), "--step", "1", "--row", "1"]) == 0
    assert "prompt of context 2," in capsys.readouterr().out
