"""PPO: `run`, `make_experience` and `update` are the algorithm; the rest of the package holds what
each line does.

On-policy, where a PPO step makes one optimizer step, its forward passes give what scoring would:
the critic's pass the values (`critic_pass`), from which advantages follow, and the actor's pass in
`update` the old log-probs.

Shapes: B rows (responses) of this rank, N rows of all ranks, P prompt tokens, R response tokens, K
reward sources.
"""

from __future__ import annotations

from dschat_ppo.checkpoint.manager import CheckpointManager
from dschat_ppo.common.phases import announce_step
from dschat_ppo.monitor.step_trace import NO_TRACE, StepTrace
from dschat_ppo.ppo.components import PPOComponents
from dschat_ppo.ppo.mini_dataset import MiniBatch, gather_rows
from dschat_ppo.ppo.step_report import PPOReport
from dschat_ppo.types import Experience


def run(
    ppo: PPOComponents,
    report: PPOReport,
    checkpointer: CheckpointManager,
    trace: StepTrace = NO_TRACE,
) -> None:
    """Run the PPO steps that are left, starting at the position in `ppo.state`. Collective.

    Args:
        ppo: what the steps are made with; its state moves on with each update and each step.
        report: takes the metrics of each step, and evaluates.
        checkpointer: saves the state where that is due.
        trace: records one of the steps.

    Raises:
        StopRequested: the run was asked to stop; its state is saved.
        UnhealthyRun: `--stop_on_health` ends the run; its state is saved.
    """
    first = ppo.state.steps + 1  # a resumed run may enter in the middle of a step
    steps = report.until_early_stop(range(first, ppo.plan.ppo_steps + 1))
    for step in trace.around(steps, first):
        announce_step(step)
        experience = ppo.state.experience  # (N, R), of a step that is resumed
        if experience is None:
            experience = make_experience(ppo, step, checkpointer)  # (N, R); None if not finite

        # shuffled in each of the PPO epochs
        for minibatch in ppo.minibatches_left(experience, step):
            update(ppo, minibatch, step)
            checkpointer.save_if_due()

        ppo.after_updates(step)  # moves what follows the actor from step to step
        report.finish(step)  # metrics, evaluation, warnings
        checkpointer.save_if_due()
        report.health.stop_if_due(checkpointer)  # --stop_on_health


def make_experience(
    ppo: PPOComponents, step: int, checkpointer: CheckpointManager
) -> Experience | None:
    """Sample responses with the current policy and score them; the same rows on every rank, which
    `ppo.state` keeps for the updates. None if no response has a score or a number is not finite:
    then this PPO step has no updates. `checkpointer` saves the state if a stop is requested
    meanwhile. Collective."""
    collection = ppo.collection
    rows = None
    with collection.cancelled_on_stop(checkpointer):
        while rows is None:  # one round, unless a feature asks for more
            prompts = collection.next_prompts()  # those of this rank

            # prompts (B, P), responses and their log-probs (B, R)
            rollout = collection.sample(prompts, step, checkpointer)

            # functions and services begin; when they have ended, (B,), and (B, K) by source
            scores = collection.reward(rollout, prompts, step)

            # log-probs of the reference and, if they are needed, of the actor; values: (B, R)
            scored = collection.forward_passes(rollout, scores, prompts)

            # (N, R), of all ranks; None: too few rows, another round follows
            rows = collection.add(gather_rows(scored), step)
    if ppo.is_unscored(rows, step):
        return None

    # clipped score on the last token, KL penalty on each: (N, R)
    rewarded = ppo.advantage_computation.with_rewards(rows)

    # values, where scoring gives none: the critic's forward and backward pass
    valued = ppo.critic_pass(rewarded, step)

    # GAE or a group's baseline, whitening: (N, R)
    experience = ppo.advantage_computation.advantages(valued, step)
    return ppo.keep_if_finite(experience, step)


def update(ppo: PPOComponents, minibatch: MiniBatch, step: int) -> None:
    """Make one optimizer step of actor and critic, and count it in `ppo.state`; each micro-batch
    holds (b, R) tensors of this rank's rows. Collective."""
    objectives = []
    if step > ppo.plan.warmup_rollouts:  # critic warm-up: until then, only the critic trains
        # clipped ratio x advantage, entropy, KL, further terms
        objectives.append(ppo.updates.actor_objective(minibatch, step))

    if ppo.engines.critic is not None:
        # clipped squared error of the values; on-policy the pass that is already made, with its
        # gradients
        objectives.append(ppo.state.critic_pass or ppo.updates.critic_objective(minibatch, step))

    outcome = ppo.updates.minimise(objectives, step)  # forward, backward, clipping, AdamW
    if "actor" in outcome.grad_norms:
        ppo.after_actor_update()  # moves what follows the actor from update to update
    ppo.state.count_update(outcome)
