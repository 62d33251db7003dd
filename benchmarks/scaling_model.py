"""What a PPO step computes and moves, by arithmetic: FLOPs, bytes between ranks, bytes of caches and optimizer.

docs/scaling.md derives the formulas; `scaling.py` compares them with runs.
"""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("rollout", "reward", "score", "train")


@dataclass(frozen=True)
class Shape:
    """A decoder as Llama builds it, without biases."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool  # whether the output head is the embedding

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of all layers."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights of the language model; norms included."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.layer_weights + self.head_weights * (1 if self.tied else 2) + norms

    def cache_bytes(self, tokens: int, size: int = 2) -> int:
        """Bytes of the keys and values of some tokens; `size`: of a number."""
        return 2 * self.layers * self.kv_heads * self.head_size * tokens * size

    def forward_flops(self, rows: int, length: int, predicted: int) -> float:
        """FLOPs of a forward pass.

        Args:
            rows: sequences.
            length: tokens of each; a token sees those before it and itself.
            predicted: tokens of each whose log-probs are computed; 0: a score instead.
        """
        products = 2 * self.layer_weights * length + 2 * self.head_weights * predicted
        pairs = length * (length + 1) / 2  # two products per pair of tokens and head: scores and weighted values
        return rows * (products + 4 * self.layers * self.heads * self.head_size * pairs)


@dataclass(frozen=True)
class Work:
    """A PPO step of one rank, in which all models have one shape.

    Attributes:
        ranks: N, which divide weights, gradients and optimizer states (ZeRO-3).
        rows: answers of this rank.
        prompt: tokens of a prompt.
        answer: tokens of an answer.
        epochs: --ppo_epochs.
        updates: optimizer steps of each of actor and critic in the PPO step.
        micro_batches: of an optimizer step, on a rank.
        scoring_passes: micro-batches of scoring.
        reward_passes: micro-batches of the reward model.
        recompute: scoring also runs actor and critic (not if a PPO step makes one update, see --old_logprobs).
        checkpointing: of both trained models.
    """

    ranks: int
    rows: int
    prompt: int
    answer: int
    epochs: int = 1
    updates: int = 1
    micro_batches: int = 1
    scoring_passes: int = 1
    reward_passes: int = 1
    recompute: bool = False
    checkpointing: bool = False


def flops(shape: Shape, work: Work) -> dict[str, float]:
    """FLOPs of a rank, by phase."""
    length = work.prompt + work.answer
    policy = shape.forward_flops(work.rows, length, work.answer)
    scalar = shape.forward_flops(work.rows, length, 0)
    passes = 4 if work.checkpointing else 3  # a backward pass is two forward passes
    return {
        "rollout": policy,
        "reward": scalar,
        "score": policy + (policy + scalar if work.recompute else 0.0),
        "train": work.epochs * passes * (policy + scalar),
    }


@dataclass(frozen=True)
class Bytes:
    """Bytes of the whole weights of each model, as a collective moves them (padded to a multiple of the ranks)."""

    actor: int
    critic: int
    reference: int
    reward: int


def gathered(weights: Bytes, work: Work) -> dict[str, int]:
    """Bytes of the tensors that are gathered, by phase, where ZeRO-3 gathers layer by layer."""
    trained = weights.actor + weights.critic
    passes = 3 if work.checkpointing else 2
    return {
        "rollout": weights.actor,
        "reward": weights.reward * work.reward_passes,
        "score": (weights.reference + (trained if work.recompute else 0)) * work.scoring_passes,
        "train": trained * passes * work.updates * work.micro_batches,
    }


def reduced(weights: Bytes, work: Work) -> int:
    """Bytes of the gradients that are reduced and scattered: once in each backward pass."""
    return (weights.actor + weights.critic) * work.updates * work.micro_batches


def sent(payload: float, ranks: int) -> float:
    """Bytes that a rank sends, and receives, when `payload` bytes are gathered, or reduced and scattered, on a ring."""
    return payload * (ranks - 1) / ranks


def seconds(shape: Shape, weights: Bytes, work: Work, rate: float, bandwidth: float) -> tuple[float, float]:
    """(computation, communication) of a PPO step, as if neither hid the other.

    Args:
        shape: of the models.
        weights: of the models.
        work: of a rank.
        rate: FLOPs per second that a rank reaches.
        bandwidth: bytes per second and direction between ranks.
    """
    moved = sum(gathered(weights, work).values()) + reduced(weights, work)
    return sum(flops(shape, work).values()) / rate, sent(moved, work.ranks) / bandwidth
