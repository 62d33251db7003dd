"""What `dschat-algorithm` prints around the formulas: it reads a recorded PPO step, calls them in
the order of the loop, and compares.

`algorithm_program.py` takes the text of this module, with the constants of a run, without the
branches that its flags switch off, and with the text of each function that it imports.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.algorithms.actor_critic_losses import value_losses
from dschat_ppo.algorithms.aggregation import Denominators, aggregate
from dschat_ppo.algorithms.kl import kl_loss
from dschat_ppo.algorithms.step import (
    AdvantageSettings,
    LossSettings,
    advantages_of,
    counted_tokens,
    loss_with_terms,
    penalised_scores,
    policy_objective,
    rewards_of_tokens,
    selected_tokens,
    token_weights,
)

if TYPE_CHECKING:
    from dschat_ppo.types import Experience


@dataclass(frozen=True)
class Rows:
    """The rows of a PPO step, N of all ranks, R response tokens. A column that the run does not
    need is None."""

    response_mask: Tensor  # (N, R) bool, True on the tokens that the policy chose
    response_lengths: Tensor  # (N,) int64, tokens after the prompt, chosen or observed
    ended: Tensor  # (N,) bool, False for responses that the length limit has cut
    groups: Tensor  # (N,) int64, number of the row's prompt
    scores: Tensor  # (N,) fp32, weighted sum over the K reward sources
    source_scores: Tensor  # (N, K) fp32, NaN where a source does not score the row
    baselines: Tensor | None  # (N,) fp32, score of the greedy response, for remax
    rollout_logprobs: Tensor  # (N, R) fp32, recorded while sampling
    old_logprobs: Tensor  # (N, R) fp32, of the policy before the updates
    ref_logprobs: Tensor | None  # (N, R) fp32, of the reference
    entropies: Tensor | None  # (N, R) fp32, in nats, of the policy before the updates
    kl: Tensor | None  # (N, R) fp32, KL to the reference, for the penalty in the reward
    values: Tensor | None  # (N, R) fp32, the critic's value before each token
    selected: Tensor | None  # (N, R) bool, tokens that clip_cov and kl_cov act on
    # what the program computes
    penalised_scores: Tensor | None = None  # (N,) fp32
    rewards: Tensor | None = None  # (N, R) fp32
    loss_mask: Tensor | None = None  # (N, R) bool, True on the tokens in the policy loss
    advantages: Tensor | None = None  # (N, R) fp32
    returns: Tensor | None = None  # (N, R) fp32, targets of the critic
    loss_weights: Tensor | None = None  # (N, R) fp32


@dataclass(frozen=True)
class UpdateSettings:
    """Further constants of the losses."""

    has_policy_loss: bool
    kl_loss_coef: float  # weight of the KL to the reference as a loss
    kl_loss_estimator: str
    kl_straight_through: bool
    has_critic: bool
    value_clip_eps: float


# the constants of a run, which `algorithm_program.py` writes
ADVANTAGE_SETTINGS = cast(AdvantageSettings, None)
LOSS_SETTINGS = cast(LossSettings, None)
UPDATE_SETTINGS = cast(UpdateSettings, None)
FLAGS = cast(dict[str, Any], None)  # a record must have been written with the same ones
LEFT_OUT = cast(str, None)  # what the run's loss has beside this program's


def experience(rows: Experience, settings: AdvantageSettings) -> Experience:
    """The rows with token rewards, advantages, and the tokens that count."""
    scores = penalised_scores(rows, settings)
    rows = replace(rows, penalised_scores=scores, loss_mask=counted_tokens(rows, settings))
    rows = replace(rows, rewards=rewards_of_tokens(scores, rows, settings))
    advantages, returns = advantages_of(rows, settings)
    rows = replace(rows, advantages=advantages, returns=returns)
    if settings.selected_tokens == "kl_cov":
        generator = torch.Generator()  # kl_cov does not draw; a record has what clip_cov has drawn
        rows = replace(rows, selected=selected_tokens(rows, advantages, settings, generator))
    return replace(rows, loss_weights=token_weights(rows, settings))


def loss_of_actor(
    logprobs: Tensor,
    entropy: Tensor,
    rows: Experience,
    denominators: Denominators,
    settings: LossSettings,
) -> tuple[Tensor, Tensor]:
    """The policy loss of an optimizer step, and the whole loss of the actor. Log-probs and
    entropies (N, R) fp32 are those of the update's forward pass: of token t of the response,
    `log_softmax(logits[t - 1] / temperature)[token]`."""
    assert rows.old_logprobs is not None
    policy = policy_objective(logprobs, rows.old_logprobs, rows, settings, denominators)
    policy_loss = policy.loss
    if not UPDATE_SETTINGS.has_policy_loss:
        policy_loss = torch.zeros_like(policy_loss)
    terms = []
    if UPDATE_SETTINGS.kl_loss_coef > 0:
        assert rows.ref_logprobs is not None
        losses = kl_loss(
            logprobs,
            rows.ref_logprobs,
            UPDATE_SETTINGS.kl_loss_estimator,
            UPDATE_SETTINGS.kl_straight_through,
        )
        mean = aggregate(losses, rows.loss_mask, settings.aggregation, denominators)
        terms.append((UPDATE_SETTINGS.kl_loss_coef, mean))
    return policy_loss, loss_with_terms(policy_loss, entropy, terms, rows, settings, denominators)


def loss_of_critic(values: Tensor, rows: Experience, value_tokens: float) -> Tensor:
    """The value loss of an optimizer step. Values (N, R) fp32 are those of its forward pass."""
    assert rows.values is not None
    losses, _ = value_losses(
        values,
        rows.values,
        rows.returns,
        rows.response_mask,
        UPDATE_SETTINGS.value_clip_eps,
    )
    return losses.sum() / value_tokens


def of_update(rows: Experience, trained: Tensor) -> Experience:
    """The rows with no token in a mask but those of an update, `trained` (N, R) bool."""
    return replace(
        rows,
        response_mask=rows.response_mask & trained,
        loss_mask=rows.loss_mask & trained,
    )


def read_record(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a record says of the step, and its columns by name, (N, R) or (N,) each. SystemExit if
    it is not that of a whole step with the flags of this program."""
    if not Path(path).is_file():
        sys.exit(f"{path}: there is no such file")
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["record"])
        names = list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names}
    lengths = tensors["response_lengths"].tolist()
    if len(lengths) < header["row_count"]:
        sys.exit(
            f"{path}: this record has {len(lengths)} of {header['row_count']} rows; record whole"
            f" steps with --record_steps {header['step']}"
        )
    for flag, value in FLAGS.items():
        if header["flags"].get(flag) != value:
            sys.exit(
                f"{path}: this record was written with --{flag} {header['flags'].get(flag)}, this"
                f" program is for {value}"
            )
    columns = {"response_lengths": tensors["response_lengths"]}
    for name, tensor in tensors.items():
        kind, _, column = name.partition(".")
        if kind == "tokens":
            columns[column] = pad_sequence([*tensor.split(lengths)], batch_first=True)
        elif kind == "rows":
            columns[column] = tensor
    return header, columns


def rows_of(columns: dict[str, Tensor]) -> Any:
    """The rows of a record, before the program computes anything."""
    return Rows(
        response_mask=columns["chosen"] & columns["has_score"].unsqueeze(1),
        response_lengths=columns["response_lengths"],
        ended=columns["finish_reason"] != CUT,
        groups=columns["groups"],
        scores=columns["scores"],
        source_scores=columns["source_scores"],
        baselines=columns.get("baselines"),
        rollout_logprobs=columns["rollout_logprobs"],
        old_logprobs=columns["old_logprobs"],
        ref_logprobs=columns.get("ref_logprobs"),
        entropies=columns.get("entropies"),
        kl=columns.get("kl"),
        values=columns.get("values"),
        selected=columns.get("selected"),
    )


CUT = 2  # in a record, how a response ended that the length limit has cut
LARGEST_DIFFERENCE = 1e-6  # relative to the largest number of its kind


def largest_difference(numbers: Tensor, recorded: Tensor) -> float:
    """The largest difference between two tensors, relative to the largest recorded number."""
    scale = recorded.abs().max().clamp_min(1e-12)
    return float((numbers - recorded).abs().max() / scale)


def compare(name: str, numbers: Tensor, recorded: Tensor) -> bool:
    """Print how far numbers are from those of the run; whether they are the same but for
    rounding."""
    difference = largest_difference(numbers, recorded)
    print(f"  {name}: norm {float(numbers.norm()):.6g}, run {float(recorded.norm()):.6g},", end=" ")
    print(f"largest difference {difference:.1e}")
    return difference <= LARGEST_DIFFERENCE


def compare_actor(
    rows: Experience, tokens: dict[str, Tensor], denominators: Denominators, entropy_coef: float
) -> list[bool]:
    """Compute the actor's loss and gradient of an update, whose tokens the record has; whether
    each is that of the run but for rounding."""
    logprobs = tokens["logprobs"].requires_grad_()
    settings = replace(LOSS_SETTINGS, entropy_coef=entropy_coef)
    policy_loss, loss = loss_of_actor(logprobs, tokens["entropies"], rows, denominators, settings)
    same = []
    if UPDATE_SETTINGS.has_policy_loss:
        recorded = aggregate(tokens["losses"], rows.loss_mask, settings.aggregation, denominators)
        same.append(compare("policy loss", policy_loss.detach(), recorded))
    if LEFT_OUT != "":
        print(f"  gradient of the log-probs: not compared; the run's also has {LEFT_OUT}")
        return same
    gradient = torch.zeros_like(logprobs)
    if loss.requires_grad:
        [gradient] = torch.autograd.grad(loss, [logprobs])
    same.append(compare("gradient of the log-probs", gradient, tokens["logprob_gradients"]))
    return same


def compare_critic(rows: Experience, tokens: dict[str, Tensor], value_tokens: float) -> bool:
    """As `compare_actor`, of the critic."""
    values = tokens["values"].requires_grad_()
    value_loss = loss_of_critic(values, rows, value_tokens)
    print(f"  value loss: {float(value_loss.detach()):.6g}")
    [gradient] = torch.autograd.grad(value_loss, [values])
    return compare("gradient of the values", gradient, tokens["value_gradients"])


def compare_step(path: str) -> bool:
    """Compute a recorded step, and print it beside what the run has computed; whether both are the
    same but for rounding."""
    header, columns = read_record(path)
    constants = header["constants"]
    print(f"PPO step {header['step']}, {header['row_count']} rows")
    settings = replace(
        ADVANTAGE_SETTINGS,
        kl_coef=constants["kl_coef"],
        score_divisor=constants["score_divisor"],
        source_weights=constants["source_weights"],
    )
    rows = experience(rows_of(columns), settings)
    same = [
        compare("token rewards", rows.rewards, columns["rewards"]),
        compare("advantages", rows.advantages, columns["advantages"]),
        compare("returns", rows.returns, columns["returns"]),
    ]
    for index, update in enumerate(constants["updates"]):
        print(f"update {index + 1}")
        tokens = {}
        for name, column in columns.items():
            if name.startswith(f"update_{index}."):
                tokens[name.partition(".")[2]] = column
        trained_rows = of_update(rows, tokens["trained"].bool())
        denominators = Denominators(**update["denominators"])
        same += compare_actor(trained_rows, tokens, denominators, update["entropy_coef"])
        if UPDATE_SETTINGS.has_critic:
            same.append(compare_critic(trained_rows, tokens, update["value_tokens"]))
    return all(same)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} RUN/record/step_000001.safetensors")
    if not compare_step(sys.argv[1]):
        sys.exit("the numbers of this program are not those of the run")
    print("equal to the run but for rounding")


if __name__ == "__main__":
    main()
