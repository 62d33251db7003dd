"""What each token of a recorded row received, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dschat_ppo.features.explain.record_files import Numbers, RecordedRow, RecordedStep

# quantity -> its name in a table; those that colours can show, in this order
QUANTITIES = {
    "advantage": "A",
    "value": "V",
    "return": "R",
    "log_ratio": "log ratio",
    "kl": "KL",
    "entropy": "H",
    "reward": "reward",
    "clipped": "clip",
}


@dataclass(frozen=True)
class ExplainedToken:
    """One token after the prompt.

    Attributes:
        piece: its text.
        is_chosen: whether the policy chose it; no loss touches the others, which are observations.
        begun_context: the number of the context whose prompt it belongs to, from 2 on; None for
            tokens that are in no prompt of a later context.
        numbers: of `QUANTITIES`, by name; None for a quantity that the run does not have, and for
            one that is not finite.
        ratio: of the policy in the forward pass of the update to the one that sampled.
        why: what the loss made of it.
        is_thought: whether it is inside <think> and </think>.
    """

    piece: str
    is_chosen: bool
    begun_context: int | None
    numbers: dict[str, float | None]
    ratio: float | None
    why: str
    is_thought: bool


def update_of(row: RecordedRow, number: int | None = None) -> int | None:
    """The index of the update to show: the row's last one, or its `number`th, counted from 1. None
    if no update of the actor saw the row."""
    seen = [index for index, update in enumerate(row.updates) if update["trained"].any()]
    if not seen:
        return None
    if number is None:
        return seen[-1]
    return seen[number - 1]


def loss_shares(row: RecordedRow, step: RecordedStep, update: int) -> Numbers:
    """The part of each token in the policy loss of an update, (n,) fp64: over all rows of the
    update they add up to that loss. As `algorithms.aggregation.aggregate` counts them."""
    mask = row.tokens["loss_mask"]
    losses = np.where(mask, row.updates[update]["losses"].astype(float), 0.0)
    denominators = step.constants["updates"][update]["denominators"]
    aggregation = step.constants["aggregation"]
    if aggregation == "token_mean":
        return losses / denominators["tokens"]
    if aggregation == "constant":
        return losses / denominators["constant"]
    if aggregation == "seq_mean_token_sum":
        return losses / denominators["rows"]
    return losses / max(1, int(mask.sum())) / denominators["rows"]


def explained_tokens(
    row: RecordedRow, step: RecordedStep, update: int | None
) -> list[ExplainedToken]:
    """The tokens of a row, with the numbers of one of the updates."""
    count = len(row.pieces)
    columns = _columns(row, update)
    ratios = None
    shares = None
    if update is not None:
        ratios = np.exp(np.clip(columns["log_ratio"].astype(float), -20, 20))
        shares = loss_shares(row, step, update)
    thoughts = _thoughts_of_contexts(row)
    begun_contexts = _begun_contexts(row)
    tokens = []
    for position in range(count):
        is_chosen = bool(row.tokens["chosen"][position])
        quantities: dict[str, float | None] = {}
        for name in QUANTITIES:
            quantities[name] = None
            if is_chosen and name in columns and math.isfinite(columns[name][position]):
                quantities[name] = float(columns[name][position])
        ratio = None
        share = None
        if is_chosen and ratios is not None and shares is not None:
            ratio = float(ratios[position])
            share = float(shares[position])
        why = _why(row, step, position, ratio, share, update)
        if begun_contexts[position] is not None:
            why = f"prompt of context {begun_contexts[position]}: not trained"
        tokens.append(
            ExplainedToken(
                piece=row.pieces[position],
                is_chosen=is_chosen,
                begun_context=begun_contexts[position],
                numbers=quantities,
                ratio=ratio,
                why=why,
                is_thought=thoughts[position],
            )
        )
    return tokens


def _contexts(row: RecordedRow) -> list[int]:
    """The number of the context of each token, from 0 on."""
    if "contexts" not in row.tokens:
        return [0] * len(row.pieces)
    return [int(context) for context in row.tokens["contexts"]]


def _begun_contexts(row: RecordedRow) -> list[int | None]:
    """`begun_context` of each token."""
    begun: list[int | None] = []
    last_chosen = 0  # the context of the last chosen token
    for context, is_chosen in zip(_contexts(row), row.tokens["chosen"].tolist(), strict=True):
        if is_chosen:
            last_chosen = context
        begun.append(context + 1 if context > last_chosen else None)
    return begun


def _thoughts_of_contexts(row: RecordedRow) -> list[bool]:
    """Whether each token is inside a thought; a thought ends with its context."""
    inside: list[bool] = []
    pieces = iter(row.pieces)
    for _, tokens in groupby(_contexts(row)):
        inside += _thoughts([next(pieces) for _ in tokens])
    return inside


def _columns(row: RecordedRow, update: int | None) -> dict[str, Numbers]:
    """The numbers of the row's tokens by quantity, those that the run has, (n,) each."""
    names = {
        "advantage": "advantages",
        "value": "values",
        "return": "returns",
        "kl": "kl",
        "entropy": "entropies",
        "reward": "rewards",
    }
    columns = {}
    for name, column in names.items():
        if column in row.tokens:
            columns[name] = row.tokens[column]
    if update is not None:
        tokens = row.updates[update]
        columns["entropy"] = tokens["entropies"]
        columns["clipped"] = tokens["clipped"]
        columns["log_ratio"] = tokens["logprobs"] - row.tokens["old_logprobs"]
    return columns


def _why(
    row: RecordedRow,
    step: RecordedStep,
    position: int,
    ratio: float | None,
    share: float | None,
    update: int | None,
) -> str:
    """What the loss made of a token."""
    if not row.tokens["chosen"][position]:
        return "observation: not trained"
    if not row.of_row["has_score"]:
        return "not trained: the row has no score"
    if not row.tokens["loss_mask"][position]:
        return "not in the loss: the answer is cut (--mask_truncated_answers)"
    if update is None or ratio is None or share is None:
        return "no update of the actor saw it"
    clauses = []
    weight = float(row.tokens["loss_weights"][position])
    if weight == 0:
        clauses.append("weight 0: no gradient")
    elif row.updates[update]["clipped"][position]:
        clauses.append(_clip_clause(step, ratio))
    else:
        count = step.constants["updates"][update]["denominators"]["tokens"]
        clauses.append(f"loss {share:+.4f}, of {int(count):,} tokens")
        if weight != 1:
            clauses.append(f"weight {weight:.3f}")
    if "selected" in row.tokens and row.tokens["selected"][position]:
        clauses.append("among the tokens of high covariance")
    if position == _last_chosen(row):
        clauses.append(_reward_clause(row, step, position))
    return "; ".join(clauses)


def _clip_clause(step: RecordedStep, ratio: float) -> str:
    """What the clip did to a token."""
    flags = step.flags
    low = flags["clip_eps"] if flags["clip_eps_low"] is None else flags["clip_eps_low"]
    high = flags["clip_eps"] if flags["clip_eps_high"] is None else flags["clip_eps_high"]
    if flags["policy_loss"] != "ppo":
        return f"clipped by {flags['policy_loss']}"
    if ratio > 1 + high:
        return f"clipped at {1 + high:.2f}: no gradient"
    if ratio < 1 - low:
        return f"clipped at {1 - low:.2f}: no gradient"
    return "clipped by --dual_clip: no gradient"


def _reward_clause(row: RecordedRow, step: RecordedStep, position: int) -> str:
    """What the reward of a row's last token is made of."""
    score = row.of_row["scores"]
    penalised = row.of_row["penalised_scores"]
    clause = f"score {score:.3f}"
    if not math.isclose(score, penalised, abs_tol=1e-6):
        clause += f", after scaling, clipping and penalties {penalised:.3f}"
    kl_coef = step.constants["kl_coef"]
    if kl_coef != 0 and "kl" in row.tokens:
        clause += f", KL {-kl_coef * float(row.tokens['kl'][position]):+.4f}"
    return clause


def _last_chosen(row: RecordedRow) -> int:
    """The position of the last token that the policy chose; -1 without any."""
    positions = np.flatnonzero(row.tokens["chosen"])
    return int(positions[-1]) if len(positions) else -1


def _thoughts(pieces: list[str]) -> list[bool]:
    """Whether each token is inside a thought, with its marks. A mark may be a special token or a
    text of several tokens; a thought that the template has opened begins at the first token."""
    text = "".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])
    inside = [False] * len(pieces)
    start = 0
    while start < len(text):
        opening = _mark(text, "think", start)
        closing = _mark(text, "/think", start)
        if opening == (-1, -1) and closing == (-1, -1):
            break
        first = opening[0]
        if first == -1 or (closing[0] != -1 and closing[0] < first):
            first = start if start == 0 else closing[0]
        last = closing[1] if closing[1] != -1 else len(text)
        for position, end in enumerate(ends):
            if end > first and end - len(pieces[position]) < last:
                inside[position] = True
        start = max(last, start + 1)
    return inside


def _mark(text: str, name: str, start: int) -> tuple[int, int]:
    """Where a mark such as <think> or ⟨think⟩ begins and ends, after `start`; (-1, -1) without."""
    spans = []
    for mark in (f"<{name}>", f"⟨{name}⟩"):
        first = text.find(mark, start)
        if first != -1:
            spans.append((first, first + len(mark)))
    return min(spans, default=(-1, -1))
