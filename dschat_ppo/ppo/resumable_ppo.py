"""The state of step 3 in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dschat_ppo.checkpoint.resumable import RankStates, load_saved, log_starts_from_scratch
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError
from dschat_ppo.monitor.health import HealthWatch
from dschat_ppo.monitor.json_lines import JsonLines
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.evaluation import Evaluation
from dschat_ppo.ppo.state import PPOComponents
from dschat_ppo.types import Engine


class ResumablePPO:
    """Saves and restores step 3; a `Resumable`. `files` grow during the run."""

    def __init__(
        self, ppo: PPOComponents, evaluation: Evaluation | None, health: HealthWatch, files: Sequence[JsonLines] = ()
    ):
        self.ppo = ppo
        self.evaluation = evaluation
        self.health = health
        self.files = files

    @property
    def engines_to_save(self) -> dict[str, Engine]:
        """The actor's engine and, if there is one, the critic's."""
        return self.ppo.engines.trained

    @property
    def position(self) -> tuple[int, int]:
        """Finished PPO steps, and optimizer steps of the one in flight."""
        return self.ppo.state.steps, self.ppo.state.updates

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation was made at this position and is the best so far."""
        best = self.evaluation.best if self.evaluation is not None else None
        return best is not None and self.position == (best[1], 0)

    def shared_state(self) -> dict[str, Any]:
        """The state that all ranks have in common."""
        ppo = self.ppo
        return {
            "progress": ppo.state.state_dict(),
            "collector": ppo.collection.state_dict(),
            "shaping": ppo.shaping.state_dict(),
            "entropy_coef": ppo.entropy_coef.state_dict(),
            "health": self.health.state_dict(),
            "guard": ppo.nonfinite.state_dict(),
            "texts": None if ppo.texts is None else ppo.texts.stream.state_dict(),
            "best": None if self.evaluation is None else self.evaluation.best,
            "files": {file.path.name: file.saved_offset() for file in self.files},
        }

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank alone."""
        average, sync = self.ppo.engines.actor_average, self.ppo.engines.reference_sync
        return {
            "sums": self.ppo.state.sums.state_dict(),
            "actor_average": None if average is None else average.state_dict(),
            "reference": None if sync is None else sync.state_dict(),
        }

    def load_state(self, shared: dict[str, Any], ranks: RankStates) -> None:
        """Restore the `shared_state` of the saved run and the `rank_state` of its ranks. `UserError` if rows of a PPO
        step in flight lack a field that the flags now need."""
        ppo = self.ppo
        ppo.state.load_state_dict(shared["progress"], self._sums_of(ranks), ppo.experience_device)
        self._load_average(ranks)
        self._load_reference(ranks)
        ppo.collection.load_state_dict(shared["collector"], ppo.device)
        self._check_rows()
        ppo.shaping.load_state_dict(shared["shaping"])
        if ppo.config.algorithm.entropy_target is not None:
            load_saved("--entropy_target", shared["entropy_coef"], ppo.entropy_coef.load_state_dict)
        self.health.load_state_dict(shared["health"])
        ppo.nonfinite.load_state_dict(shared["guard"])
        if ppo.texts is not None:
            load_saved("--unsupervised_dataset_name", shared["texts"], ppo.texts.stream.load_state_dict)
        if self.evaluation is not None and shared["best"] is not None:
            self.evaluation.best = tuple(shared["best"])
        for file in self.files:
            file.offset = shared["files"].get(file.path.name, 0)

    def _check_rows(self) -> None:
        """Check the rows of a PPO step in flight, and those kept for the next one: the saved flags made them."""
        algorithm, pool = self.ppo.config.algorithm, self.ppo.collection.pool
        needed = {"values": algorithm.has_critic, "ref_logprobs": algorithm.has_reference}
        needed["selected"] = algorithm.selects_tokens
        needed["data_sources"] = self.ppo.collection.several_data_sets
        kept = [vars(rows) for rows in (self.ppo.state.experience, pool and pool.accepted) if rows is not None]
        missing = [
            name for name in needed if needed[name] and any(name in rows and rows[name] is None for rows in kept)
        ]
        if missing:
            raise UserError(
                f"--resume_force: rows of a PPO step in the checkpoint have no {', '.join(missing)}, which the flags "
                "now need; restore the former settings, or resume from a checkpoint without such rows by --resume "
                "FOLDER"
            )

    def _sums_of(self, ranks: RankStates) -> MetricSums:
        """This rank's part of the metric sums. On another number of ranks, rank 0 takes the sums of all ranks; the
        others take the same names with nothing counted, so that `reduce` is the same collective on every rank."""
        device = self.ppo.device
        if ranks.own is not None:
            return MetricSums.restored([ranks.own["sums"]], device)
        sums = MetricSums.restored([state["sums"] for state in ranks.read_all()], device)
        return sums if dist.is_main() else sums.emptied()

    def _load_average(self, ranks: RankStates) -> None:
        """Restore the moving average, from the parts of all ranks where their number has changed."""
        average = self.ppo.engines.actor_average
        if average is None:
            return
        own = None if ranks.own is None else ranks.own["actor_average"]
        if own is not None and average.has_layout_of(own):
            average.load_state_dict(own)
        elif not average.load_parts(state["actor_average"] or {} for state in ranks.read_all()):
            log_starts_from_scratch("--enable_ema")
            average.begin()

    def _load_reference(self, ranks: RankStates) -> None:
        """Restore a reference that moves. Checkpoints without `--ref_sync_interval` hold none."""
        sync = self.ppo.engines.reference_sync
        if sync is None:
            saved = next(ranks.read_all()) if ranks.own is None else ranks.own
            if saved["reference"]:
                logger().info(
                    "--ref_sync_interval: was on when the checkpoint was saved; the reference starts from its model "
                    "folder again"
                )
            return
        own = None if ranks.own is None else ranks.own["reference"]
        if own is not None and sync.has_layout_of(own):
            sync.load_state_dict(own)
        elif not sync.load_parts(state["reference"] or {} for state in ranks.read_all()):
            log_starts_from_scratch("--ref_sync_interval")
