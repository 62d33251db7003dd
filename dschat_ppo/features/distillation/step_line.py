"""Columns of the line that a run prints about a PPO step."""

COLUMNS = (  # label, metric, form
    ("divergence", "distill/divergence", "7.4f"),
    ("teacher KL", "distill/kl_k1", "7.4f"),
)
