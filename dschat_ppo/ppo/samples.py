"""Answers of training with their scores: in `samples.jsonl` and on the terminal, every few PPO
steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.common import dist
from dschat_ppo.episodes.shown_turns import heading, turns_of
from dschat_ppo.monitor.writers import JsonLines
from dschat_ppo.ppo.response_texts import episode_texts, texts_of
from dschat_ppo.types import FinishReason, ScoredRollout, row_lengths, select_rows, to_device


@dataclass(frozen=True)
class Samples:
    """Writes `count` answers of the first PPO step, and of every so many."""

    lines: JsonLines
    every: int  # 0: of none
    count: int
    tokenizer: PreTrainedTokenizerBase
    sources: Sequence[str]  # names of the reward sources in the order of `source_scores`
    # names of the data sets in the order of their numbers in the rows
    data_sources: Sequence[str] = ()

    def is_due(self, step: int) -> bool:
        """Whether answers of PPO step `step` are written."""
        return self.every > 0 and (step == 1 or step % self.every == 0)

    def write(self, step: int, rows: ScoredRollout) -> list[dict[str, Any]]:
        """Write answers of PPO step `step`, of the rows of all ranks, and return them; only rank 0
        does anything."""
        if not dist.is_main():
            return []
        if rows.sampled_mask is not None:  # those that left their group too
            rows = replace(rows, response_mask=rows.sampled_mask)
        scores = rows.scores.nan_to_num(nan=-math.inf)  # without a score: below the others
        index = shown_rows(rows.groups.tolist(), scores.tolist(), self.count)
        shown = to_device(select_rows(rows, torch.tensor(index, device=rows.groups.device)), "cpu")
        lines = sample_lines(shown, self.tokenizer, self.sources, self.data_sources)
        self.lines.append({"step": step, **line} for line in lines)
        return lines


def shown_rows(groups: Sequence[int], scores: Sequence[float], count: int) -> list[int]:
    """At most `count` rows: of each prompt, in the order of the run, the answer with the highest
    and the one with the lowest score. Of equal scores, the first row is the highest and the last
    the lowest. `groups`: the number of each row's prompt."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    found: list[int] = []
    for group in sorted(members):
        ranked = sorted(members[group], key=lambda row: -scores[row])
        found += [ranked[0], ranked[-1]] if len(ranked) > 1 else ranked
        if len(found) >= count:
            break
    return found[:count]


def sample_lines(
    rows: ScoredRollout,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    data_sources: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """What `samples.jsonl` says of each row (on the CPU), without the step; for the names, see
    `Samples`. The score of a row that left its group is NaN, and its KL None."""
    prompts = texts_of(tokenizer, rows.prompt_ids, rows.prompt_mask, skip_special_tokens=True)
    answers = episode_texts(tokenizer, rows)
    lengths = rows.response_mask.sum(dim=1)  # (B,)
    tokens = row_lengths(rows)
    kl: list[float | None] = [None] * len(answers)
    if rows.ref_logprobs is not None:
        kl = (kl_k1(rows.policy_logprobs, rows.ref_logprobs).sum(dim=1) / lengths).tolist()
    lines = []
    for row, (prompt, answer, turns) in enumerate(
        zip(prompts, answers, turns_of(tokenizer, rows), strict=True)
    ):
        named = zip(sources, rows.source_scores[row].tolist(), strict=True)
        # only those that score it
        by_source = {name: score for name, score in named if not math.isnan(score)}
        line = {
            "prompt": prompt,
            "answer": answer,
            "tokens": int(tokens[row]),
            "score": float(rows.scores[row]),
            "scores": by_source,
            "kl": None if math.isnan(rows.scores[row]) else kl[row],
            "length": int(lengths[row]),
            "ended": FinishReason(int(rows.finish_reason[row])).name.lower(),
        }
        if len(data_sources) > 1 and rows.data_sources is not None:
            line["data_source"] = data_sources[int(rows.data_sources[row])]
        if turns:
            line["turns"] = turns
        lines.append(line)
    return lines


def printed_answers(step: int, lines: Sequence[dict[str, Any]]) -> str:
    """The answers of PPO step `step`, given as `sample_lines`, as text for a terminal."""
    ended = {
        "eos": "ended by EOS",
        "stop": "ended by a stop string",
        "length": "cut at the length limit",
    }
    parts = [f"PPO step {step}: {len(lines)} answers"]
    for number, line in enumerate(lines, start=1):
        by_source = ", ".join(f"{name} {score:.3f}" for name, score in line["scores"].items())
        if math.isnan(line["score"]):
            score = "none"
        else:
            score = f"{line['score']:.3f}"
        if len(line["scores"]) > 1:
            score += f" ({by_source})"
        parts.append(f"[{number}] score {score}, {line['length']} tokens, {ended[line['ended']]}")
        parts.append(_indented("prompt", line["prompt"]))
        turns = [_indented(heading(turn), turn["text"]) for turn in line.get("turns", ())]
        parts += turns or [_indented("answer", line["answer"])]
    return "\n".join(parts)


def _indented(name: str, text: str) -> str:
    """The text after its name. Control characters, which could move the cursor or change colours,
    are replaced."""
    lines = text.expandtabs().split("\n")
    safe = [
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
        for line in lines
    ]
    return f"    {name}: " + f"\n{' ' * (len(name) + 6)}".join(safe)
