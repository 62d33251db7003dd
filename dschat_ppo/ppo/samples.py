"""Responses of training with their scores: in `samples.jsonl` and on the terminal, every few PPO
steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.common import dist
from dschat_ppo.data.prompt_contents import (
    TEXT_ALONE,
    PromptContent,
    prompt_content,
    readable_prompts,
    unpadded_ids,
)
from dschat_ppo.features import hooks
from dschat_ppo.models.given_embeddings import GivenSource
from dschat_ppo.monitor.writers import JsonLines
from dschat_ppo.ppo.response_texts import heading, shown_sections, whole_texts
from dschat_ppo.types import (
    FinishReason,
    PromptBatch,
    Rollout,
    ScoredRollout,
    row_lengths,
    select_rows,
    to_device,
)

# responses in samples.jsonl: of the first prompts, those with the highest and the lowest score
SAMPLES_PER_STEP = 8


@dataclass(frozen=True)
class Samples:
    """Writes responses of the first PPO step, and of every `every`th."""

    lines: JsonLines
    every: int  # PPO steps; 0: none is written
    count: int  # responses of a PPO step, at most
    tokenizer: PreTrainedTokenizerBase
    sources: Sequence[str]  # names of the reward sources in the order of `source_scores`
    # names of the data sets, which the rows index
    data_sources: Sequence[str] = ()
    given_source: GivenSource | None = None  # of what prompts hold besides text

    def is_due(self, step: int) -> bool:
        """Whether responses of PPO step `step` are written."""
        return is_sampled(step, self.every)

    def write(self, step: int, rows: ScoredRollout) -> list[dict[str, Any]]:
        """Write responses of PPO step `step` and return their lines; [] on other ranks than 0.
        `rows`: those of all ranks."""
        if not dist.is_main():
            return []
        if rows.sampled_mask is not None:  # those that left their group too
            rows = replace(rows, response_mask=rows.sampled_mask)
        index = torch.tensor(sampled_rows(rows, self.count), device=rows.groups.device)
        written_rows = to_device(select_rows(rows, index), "cpu")
        contents = contents_of(written_rows, self.given_source)
        lines = sample_lines(
            written_rows, self.tokenizer, self.sources, self.data_sources, contents
        )
        self.lines.append({"step": step, **line} for line in lines)
        return lines


def is_sampled(step: int, every: int) -> bool:
    """Whether responses of PPO step `step` are samples: of the first one, and of every `every`th;
    0: of none."""
    return every > 0 and (step == 1 or step % every == 0)


def sampled_rows(rows: ScoredRollout, count: int) -> list[int]:
    """The indices of at most `count` of the rows, which are samples."""
    scores = rows.scores.nan_to_num(nan=-math.inf)  # without a score: below the others
    return best_and_worst_rows(rows.groups.tolist(), scores.tolist(), count)


def best_and_worst_rows(groups: Sequence[int], scores: Sequence[float], count: int) -> list[int]:
    """At most `count` rows: of each prompt, in the order of the run, the response with the highest
    and the one with the lowest score. Of equal scores, the first row is the highest and the last
    the lowest. `groups`: the index of each row's prompt."""
    rows_of_group: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of_group.setdefault(group, []).append(row)
    rows: list[int] = []
    for group in sorted(rows_of_group):
        ranked = sorted(rows_of_group[group], key=lambda row: -scores[row])
        rows.append(ranked[0])
        if len(ranked) > 1:
            rows.append(ranked[-1])
        if len(rows) >= count:
            break
    return rows[:count]


def contents_of(rows: PromptBatch | Rollout, source: GivenSource | None) -> list[PromptContent]:
    """What the prompts of rows hold besides text, by the `source` of what models get for it."""
    if source is None:
        return [TEXT_ALONE] * len(rows.prompt_ids)
    return [prompt_content(record) for record in source.records_of(rows)]


def sample_lines(
    rows: ScoredRollout,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    data_sources: Sequence[str] = (),
    contents: Sequence[PromptContent] = (),
) -> list[dict[str, Any]]:
    """What `samples.jsonl` says of each row, without the step. The score of a row that left its
    group is NaN, and its KL None.

    Args:
        rows: with scores, on the CPU.
        tokenizer: decodes prompts and responses.
        sources: names of the K reward sources.
        data_sources: names of the data sets; with one, lines do not name it.
        contents: what the prompt of each row holds besides text; (): nothing.
    """
    contents = contents or [TEXT_ALONE] * len(rows.prompt_ids)
    prompts = readable_prompts(tokenizer, unpadded_ids(rows.prompt_ids, rows.prompt_mask), contents)
    answers = whole_texts(tokenizer, rows)
    lengths = rows.response_mask.sum(dim=1)  # (B,)
    tokens = row_lengths(rows)
    kl: list[float | None] = [None] * len(answers)
    if rows.ref_logprobs is not None:
        kl = (kl_k1(rows.policy_logprobs, rows.ref_logprobs).sum(dim=1) / lengths).tolist()
    remarks = _remarks_of_features(rows)
    lines = []
    texts = zip(prompts, answers, shown_sections(tokenizer, rows), strict=True)
    for row, (prompt, answer, sections) in enumerate(texts):
        line = {
            "prompt": prompt,
            "answer": answer,
            "tokens": int(tokens[row]),
            "score": float(rows.scores[row]),
            "scores": _scores_by_source(sources, rows.source_scores[row]),
            "kl": None if math.isnan(rows.scores[row]) else kl[row],
            "length": int(lengths[row]),
            "ended": FinishReason(int(rows.finish_reason[row])).name.lower(),
        }
        if len(data_sources) > 1 and rows.data_sources is not None:
            line["data_source"] = data_sources[int(rows.data_sources[row])]
        if contents[row].record:
            line["content"] = contents[row].record
        if sections:
            line["turns"] = sections
        if remarks[row]:
            line["remarks"] = remarks[row]
        lines.append(line)
    return lines


def _scores_by_source(sources: Sequence[str], source_scores: Tensor) -> dict[str, float]:
    """The scores of a row, (K,), of the sources that score it."""
    by_source = {}
    for name, score in zip(sources, source_scores.tolist(), strict=True):
        if not math.isnan(score):
            by_source[name] = score
    return by_source


def _remarks_of_features(rows: ScoredRollout) -> list[dict[str, str]]:
    """Texts about each row, by their name. A feature offers `sample_remarks.remarks_of`."""
    remarks: list[dict[str, str]] = [{} for _ in rows.response_ids]
    for remarks_of in hooks("sample_remarks.remarks_of"):
        for remarks_on_row, remarks_of_feature in zip(remarks, remarks_of(rows), strict=True):
            remarks_on_row |= remarks_of_feature
    return remarks


def printed_responses(step: int, lines: Sequence[dict[str, Any]]) -> str:
    """The responses of PPO step `step`, given as `sample_lines`, as text for a terminal."""
    ended = {
        "eos": "ended by EOS",
        "stop": "ended by a stop string",
        "length": "cut at the length limit",
    }
    blocks = [f"PPO step {step}: {len(lines)} answers"]
    for position, line in enumerate(lines, start=1):
        score = "none"
        if not math.isnan(line["score"]):
            score = f"{line['score']:.3f}"
        if len(line["scores"]) > 1:
            by_source = [f"{name} {value:.3f}" for name, value in line["scores"].items()]
            score += f" ({', '.join(by_source)})"
        blocks.append(
            f"[{position}] score {score}, {line['length']} tokens, {ended[line['ended']]}"
        )
        blocks.append(_labelled("prompt", line["prompt"]))
        sections = line.get("turns", [])
        for section in sections:
            blocks.append(_labelled(heading(section), section["text"]))
        if not sections:
            blocks.append(_labelled("answer", line["answer"]))
        for name, remark in line.get("remarks", {}).items():
            blocks.append(_labelled(name, remark))
    return "\n".join(blocks)


def _labelled(label: str, text: str) -> str:
    """The text after its label, its further lines below its first one. Control characters, which
    could move the cursor or change colours, are replaced."""
    prefix = f"    {label}: "
    line_break = "\n" + " " * len(prefix)
    characters = []
    for character in text.expandtabs():
        if character == "\n":
            characters.append(line_break)
        elif character.isprintable():
            characters.append(character)
        else:
            characters.append("\N{REPLACEMENT CHARACTER}")
    return prefix + "".join(characters)
