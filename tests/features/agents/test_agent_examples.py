"""The examples of agents: they draw the tokens of the same tasks with `--tools` and with
`--environment`, and step 3 accepts their commands."""

import importlib
import json
import random
import shutil
import subprocess
import sys
from functools import cache

import pytest
import torch
from launch import ROOT, environment, succeed
from prepared import flags_for, write_jsonl
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.config.feature_flags import FeatureFlags
from dschat_ppo.config.step_config import flatten
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.templates import render
from dschat_ppo.features.agents import rollouts as agents
from dschat_ppo.features.agents.flags import AgentFlags
from dschat_ppo.features.environments import rollouts as environments
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.ppo.rollouts import RolloutTask
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.tools.evaluated_model import ModelGeneration

pytest.importorskip("openai")
EXAMPLES = ROOT / "training_scripts/examples"
LAUNCH_STUBS = """
top="$PWD" RANKS="${RANKS:-1}" DTYPE=fp32
launch() { command python -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"; }
python() { echo "made $1" >&2; }
is_valid_json() { [ -e asked ] || { touch asked && false; } }
"""
SFT_STEPS = 50
PROMPT_LENGTH, RESPONSE_LENGTH = 48, 100


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder, tokenizer and model of an example after a little SFT, by its name."""

    @cache
    def train(name):
        folder = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(EXAMPLES / name))
            for module in ("task", "calculator", "game"):
                patch.delitem(sys.modules, module, raising=False)
            task = importlib.import_module("task")
            patch.setattr(task, "COUNTS", {"sft": 200, "prompts": 4, "heldout": 2})
            task.make(folder, 3)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        rows = [json.loads(line) for line in (folder / "data/sft.jsonl").read_text().splitlines()]
        # those that go on after their first message
        learn(model, tokenizer, [row for row in rows if len(row["messages"]) > 2])
        return folder, tokenizer, model.eval()

    return train


def learn(model, tokenizer, rows):
    """Some steps of plain SFT on whole conversations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    chance = random.Random(4)
    for _ in range(SFT_STEPS):
        texts = []
        for row in chance.sample(rows, 16):
            texts.append(render(tokenizer, row["messages"], False, tools=row.get("tools")))
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits
        cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def rollout_of(feature, flags, trained, folder, engine):
    """The first rollout with these flags: 4 prompts of 2 answers; its scores and metrics."""
    task_folder, tokenizer, model = trained
    features = FeatureFlags(flags)
    rows = (task_folder / "data/prompts.jsonl").read_text().splitlines()
    data = write_jsonl(folder / "prompts.jsonl", rows)
    tools = feature.tools_of(features, tokenizer, PROMPT_LENGTH)
    step = StepData(
        "prompt",
        flags_for(folder, data, use="prompt", apply_chat_template=True),
        PROMPT_LENGTH,
        tools=tools,
        whole_flag="--data_path",
    )
    prompts = prepare(step, tokenizer).eval
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    config = GenerationConfig(
        SamplingParameters(),
        StoppingCriteria(RESPONSE_LENGTH, (end,), decode=tokenizer.batch_decode),
        samples=2,
        engine=engine,
    )
    extension = feature.start_extension(features, tokenizer, PROMPT_LENGTH, None)
    try:
        sample = extension.wrap(None, ModelGeneration(model))
        rollout = sample(RolloutTask(prompts, range(len(prompts)), config, 7, (1, 0), 0, 1))
        sources = [source for source, _ in extension.reward_sources]
        scores = [source(None, rollout) for source in sources]
        return rollout, scores, extension.take_metrics()
    finally:
        extension.close()


OURS = {
    "calculator": {"tools": [f"{EXAMPLES}/calculator/calculator.py:calculate"]},
    "twenty_questions": {"environment": f"{EXAMPLES}/twenty_questions/game.py:TwentyQuestions"},
}


def case(name, engine, form, *marks):
    return pytest.param(name, engine, form, marks=marks)


@pytest.mark.parametrize(
    ("name", "engine", "form"),
    [
        case("calculator", "padded", "function", pytest.mark.release),
        case("calculator", "continuous", "function", pytest.mark.release),
        case("calculator", "padded", "program", pytest.mark.release),
        case("twenty_questions", "padded", "function", pytest.mark.release),
        case("twenty_questions", "continuous", "program", pytest.mark.release),
    ],
)
def test_agents_draw_the_tokens_of_tools_and_environments(trained, tmp_path, name, engine, form):
    flags = AgentFlags(agent=f"{EXAMPLES}/agents/{name}_agent.py:play")
    if form == "program":
        program = f"{sys.executable} '{EXAMPLES}/agents/program.py' {name}"
        flags = AgentFlags(agent_command=program)
    episodes = (EnvironmentFlags(**OURS[name]), AgentFlags())
    expected, scores, _ = rollout_of(environments, episodes, trained(name), tmp_path, engine)
    rollout, agent_scores, metrics = rollout_of(
        agents, (flags, EnvironmentFlags()), trained(name), tmp_path, engine
    )
    assert metrics["agent/failures"] == 0 and metrics["agent/contexts"] == 1
    assert metrics["agent/calls"] > 1.5
    for field in ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "finish_reason"):
        assert torch.equal(getattr(rollout, field), getattr(expected, field)), field
    difference = float((rollout.rollout_logprobs - expected.rollout_logprobs).abs().max())
    most = {"padded": 0.0, "continuous": 1e-5}
    assert difference <= most[engine]
    if scores:  # of the environment
        assert torch.equal(agent_scores[0], scores[0])


@pytest.mark.parametrize("form", ["function", "program"])
@pytest.mark.parametrize("name", ["calculator", "twenty_questions"])
def test_step_3_accepts_the_commands_of_agents(tmp_path, name, form):
    shutil.copytree(EXAMPLES, tmp_path / "training_scripts/examples")
    (tmp_path / "training_scripts/ranks.sh").write_text(LAUNCH_STUBS)
    script = tmp_path / "training_scripts/examples/agents/run.sh"
    command = ["bash", script, "out", name, form, "--seed", "7"]
    result = succeed(
        subprocess.run(
            command, env=environment(), cwd=tmp_path, text=True, capture_output=True, check=False
        )
    )
    sft, ppo = map(json.loads, result.stdout.splitlines())
    trained, config = parse("sft", sft[1:]), parse("ppo", ppo[1:])
    settings = flatten(config)
    assert (
        flatten(trained)["output_dir"]
        == settings["actor_model_name_or_path"]
        == (f"out/{name}/sft")
    )
    assert settings["seed"] == 7 and settings["output_dir"] == f"out/{name}/{form}"
    flags = config.of(AgentFlags)
    assert flags.is_used and bool(flags.agent) == (form == "function")
    assert settings["n_samples_per_prompt"] == {"calculator": 8, "twenty_questions": 4}[name]
