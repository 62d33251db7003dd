"""A harness of `verifiers` whose loop runs in this process: its own ones start a program that `uv`
fetches. Its name, "verifiers_harness", is that of this module."""

from __future__ import annotations

import openai
import verifiers.v1 as vf
from calculator_agent import TOOL, result_of

__all__ = ["LoopHarness"]


class LoopConfig(vf.HarnessConfig):
    """Names this harness."""

    id: str = "verifiers_harness"


class LoopHarness(vf.Harness[LoopConfig]):
    """Asks the model, carries out its calls of the calculator, and asks again, until it calls
    nothing."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Play one episode with the model at `endpoint`, which verifiers puts before ours."""
        client = openai.AsyncOpenAI(
            base_url=endpoint,
            api_key=secret,
            max_retries=0,
            timeout=None,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )
        messages = [{"role": "user", "content": data.prompt}]
        while True:
            try:
                reply = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[TOOL]
                )
            except openai.BadRequestError:  # a limit of the run, such as --max_turns
                break
            choice = reply.choices[0]
            messages.append(choice.message)
            if choice.finish_reason != "tool_calls":
                break
            for call in choice.message.tool_calls:
                result = {"role": "tool", "tool_call_id": call.id, "content": result_of(call)}
                messages.append(result)
        await client.close()
        return vf.ProgramResult(0, "", "")
