"""Sums with a calculator, as a task of `verifiers` (0.4, which needs Python 3.11 and openai<3).

    --agent verifiers_agent.py:play
    --agent_command "VENV/bin/python verifiers_agent.py"

The second form runs it in an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "calculator")]
from calculator import right_sum  # noqa: E402
from verifiers_harness import LoopConfig  # noqa: E402


class SumData(vf.TaskData):
    """A row of the data."""

    answer: str


class SumTask(vf.Task[SumData]):
    """A sum, and what an answer to it is worth."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right sum."""
        replies = trace.assistant_messages
        said = ""
        if replies:
            said = replies[-1].content or ""
        return float(right_sum(said, self.data.answer))


async def play(base_url, model, prompt, answer):
    """Play one episode by an agent of verifiers, which takes the key from OPENAI_API_KEY."""
    endpoint = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(
        harness=LoopConfig(), runtime=vf.SubprocessConfig(), model=model, client=endpoint
    )
    data = SumData(prompt=prompt[-1]["content"], answer=answer)
    trace = await vf.make_agent(config).run(SumTask(data))
    if trace.errors:
        raise RuntimeError(str(trace.errors[-1]))
    return {"reward": trace.reward, "model_calls": trace.num_turns}


if __name__ == "__main__":
    row = json.load(sys.stdin)
    result = asyncio.run(
        play(
            os.environ["OPENAI_BASE_URL"],
            os.environ["OPENAI_MODEL"],
            row["prompt"],
            row["answer"],
        )
    )
    Path(os.environ["DSCHAT_RESULT"]).write_text(json.dumps(result))
