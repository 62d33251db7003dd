"""The processes of an agent, and the parameters that its function must be given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from dschat_ppo.common.extras import require_extra
from dschat_ppo.errors import UserError
from dschat_ppo.features.agents.flags import AgentFlags
from dschat_ppo.features.agents.forms import OURS, AgentResult
from dschat_ppo.features.environments.episode_processes import Episodes
from dschat_ppo.rewards.worker_pool import CallError

_FORM = "dschat_ppo.features.agents.forms:form_of_agent"


def start_agents(flags: AgentFlags, seconds: float, workers: int) -> Episodes[AgentResult]:
    """The processes of the agents of a rank, `workers` of which run at a time, each for `seconds`
    of its own. `UserError` if the agent cannot be used."""
    require_extra("uvicorn", flags.as_written)
    try:
        return Episodes(flags.names, seconds, workers, AgentResult, _FORM)
    except CallError as problem:
        raise UserError(f"{flags.as_written}: cannot be used: {problem}") from None


@cache
def agent_parameters(flags: AgentFlags) -> tuple[str, ...]:
    """The parameters without a default of the agent's function, which a process imports once; none
    of a program. `UserError` if the agent cannot be used."""
    agents = start_agents(flags, seconds=1.0, workers=1)
    agents.close()
    return tuple(map(str, agents.tools))


def check_parameters(flags: AgentFlags, parameters: Sequence[str], rows: Sequence[str]) -> None:
    """`UserError` if a parameter is neither ours nor a column of one of the data rows, which are
    JSON."""
    missing = [name for name in parameters if name not in OURS]
    columns = dict[str, None]()
    for text in rows:
        missing = [name for name in missing if name not in columns]
        if not missing:
            return
        columns |= dict.fromkeys(json.loads(text))
    for name in missing:
        if name not in columns:
            names = [column for column in columns if not column.startswith("_")]
            raise UserError(
                f"{flags.as_written}: its parameter '{name}' is no column of the data"
                f" (columns: {', '.join(names)}) and none of {', '.join(OURS)}"
            )
