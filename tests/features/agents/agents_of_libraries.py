"""Agents of other projects, as their documentation writes them; each is for a test that is skipped
where its library is missing."""

import yaml


def smolagents(base_url, api_key):
    """An agent that writes code."""
    from smolagents import CodeAgent, OpenAIModel, tool

    @tool
    def look(at: str) -> str:
        """To look.

        Args:
            at: where.
        """
        return f"At {at}: nothing."

    model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = CodeAgent(tools=[look], model=model, verbosity_level=0)
    return float(agent.run("Where?") == "nothing")


def smolagents_tools(base_url, api_key):
    """An agent that calls tools. Its requests say `tool_choice="required"`."""
    from smolagents import OpenAIModel, ToolCallingAgent

    model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[], model=model, verbosity_level=0)
    return float(agent.run("Where?") == "nothing")


async def langchain_openai(base_url, api_key):
    """A chat model with a tool, streamed the second time."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def look(at: str) -> str:
        """To look."""
        return f"At {at}: nothing."

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key).bind_tools([look])
    messages = [HumanMessage("Where?")]
    reply = await model.ainvoke(messages)
    messages.append(reply)
    for call in reply.tool_calls:
        messages.append(ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"]))
    said = ""
    async for chunk in model.astream(messages):
        said += chunk.content
    return float(said == "I see nothing.")


def minisweagent(base_url, api_key):
    """The agent of mini-swe-agent with its own prompts, in a shell."""
    import minisweagent
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    model = LitellmModel(
        model_name="openai/policy",
        cost_tracking="ignore_errors",
        **config["model"] | {"model_kwargs": {"api_base": base_url, "api_key": api_key}},
    )
    prompts = {key: config["agent"][key] for key in ("system_template", "instance_template")}
    agent = DefaultAgent(model, LocalEnvironment(), **prompts)
    result = agent.run("Say hi.")
    assert minisweagent.__version__
    return float(result["submission"].strip() == "hi")


async def play(base_url, api_key, case):
    result = globals()[case](base_url, api_key)
    if not isinstance(result, float):
        result = await result
    return result
