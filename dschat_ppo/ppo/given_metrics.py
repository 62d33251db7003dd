"""Metrics of what models get in place of the embeddings of some ids, such as features of images."""

from __future__ import annotations

from dschat_ppo.common import dist
from dschat_ppo.models.given_embeddings import GivenSource, usage_metrics
from dschat_ppo.ppo.samples import contents_of
from dschat_ppo.types import ScoredRollout, row_lengths


def given_metrics(source: GivenSource | None, rows: ScoredRollout) -> dict[str, float]:
    """The share of the tokens of a PPO step that stand for what the `source` gives, and its usage
    since the last step. `rows`: of all ranks. Collective."""
    if source is None:
        return {}
    tokens = 0
    for content in contents_of(rows, source):
        tokens += sum(end - start for start, end in content.spans)
    share = tokens / int(row_lengths(rows).sum())
    usages = dist.gather_objects(source.take_usage())
    return {f"{source.name}/token_share": share, **usage_metrics(source.name, usages)}
