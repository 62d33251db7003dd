"""Random agents in this process, in place of the front and the processes of agents: they ask as
programs do, by bodies of requests, and keep every reply that they got."""

import json
import random
from collections import deque

from random_agents import CALL, SHAPES_OF_AGENTS, RandomAgent
from tiny_models import new_model

from dschat_ppo.features.agents.call_requests import chat_message
from dschat_ppo.features.agents.forms import AgentResult
from dschat_ppo.features.agents.front import CHAT, JSON
from dschat_ppo.features.agents.front_link import FrontEvent

TWO_CALLS = CALL % "a" + CALL % "b"
THOUGHT = "<think>\nUm.\n</think>\n\n"


def talkative(name):
    """(tokenizer, tools, model): a random model whose likely tokens end a reply, think, and call
    tools."""
    tokenizer, tools = SHAPES_OF_AGENTS[name]
    tokenizer = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer.from_str(tokenizer.backend_tokenizer.to_str()),
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
    )
    tokenizer.add_tokens([THOUGHT, TWO_CALLS])
    model = new_model("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    likely = {"<|im_end|>": 3.5, THOUGHT: 6.5, TWO_CALLS: 5.0 * bool(tools)}
    # a constant part of each state, which the head reads as a bias
    model.model.embed_tokens.weight.data[:, 0] = 10.0
    model.lm_head.weight.data[:, 0] = 0.0
    for text, bias in likely.items():
        model.lm_head.weight.data[tokenizer.convert_tokens_to_ids(text), 0] = bias
    return tokenizer, tools, model


class RandomProgram:
    """A program. What it does depends on its replies alone if it makes one call at a time."""

    def __init__(self, seed, tools):
        self.chance = random.Random(seed)
        self.agent = RandomAgent(self.chance, tools)
        self.left = self.chance.randint(2, 9)
        self.asked = {}  # number of a request -> (prompt, body)
        self.taken = []  # (ids of the prompt, ids of the reply) of replies that it got
        self.parallel = 0  # replies with several calls

    def body(self, prompt):
        fields = {
            "messages": prompt.messages,
            "tools": prompt.tools,
            "max_tokens": self.chance.randint(3, 12),
            "return_token_ids": True,
        }
        return json.dumps(fields).encode()

    def take(self, prompt, completion):
        [choice] = completion["choices"]
        self.taken.append((completion["prompt_token_ids"], choice["token_ids"]))
        message = {key: value for key, value in choice["message"].items() if value is not None}
        self.parallel += len(message.get("tool_calls", [])) > 1
        self.agent.hear(prompt, chat_message(message))


class RandomPrograms:
    """`Episodes` of random programs."""

    def __init__(self, seed, tools):
        self.seed = seed
        self.tools = tools
        self.programs = {}
        self.running = set()

    def begin(self, index, *arguments):
        self.programs[index] = RandomProgram(f"{self.seed} {index}", self.tools)
        self.running.add(index)

    def poll(self, seconds):
        over = [i for i in self.running if not self.programs[i].left and not self.programs[i].asked]
        self.running -= set(over)
        return [(index, AgentResult(1.0)) for index in sorted(over)]

    def ignore(self, index):
        pass

    stop_clock = start_clock = end = ignore


class RandomFront:
    """`Front` of random programs, which lose some replies, and ask some of these again."""

    admitted = 0
    base_url = ""

    def __init__(self, agents, most):
        self.agents = agents
        self.most = most  # calls of a program at a time
        self.events = deque()
        self.count = 0
        self.owners = {}  # number of a request -> index of its program
        self.retried = 0
        self.refused = 0

    def admit(self, episode):
        return str(episode)

    def dismiss(self, key, episode):
        self.events.append(FrontEvent("dismissed", -1, episode))

    def ask(self, index, prompt, body, retries=0):
        self.count += 1
        self.owners[self.count] = index
        self.agents.programs[index].asked[self.count] = prompt, body
        self.events.append(FrontEvent("call", self.count, index, CHAT, retries, body))

    def flush(self):
        """Its replies arrive at once."""

    def poll(self, seconds=0.0):
        for index in sorted(self.agents.running):
            program = self.agents.programs[index]
            while program.left and len(program.asked) < self.most:
                if program.asked and program.chance.random() < 0.6:
                    break
                program.left -= 1
                prompt = program.agent.next_prompt()
                self.ask(index, prompt, program.body(prompt))
        events = list(self.events)
        self.events.clear()
        return events

    def reply(self, number, status, body, content_type=JSON):
        index = self.owners[number]
        program = self.agents.programs[index]
        prompt, asked = program.asked.pop(number)
        if status != 200:
            assert json.loads(body)["error"]["code"] in ("max_contexts", "context_length_exceeded")
            self.refused += 1
        elif program.chance.random() < 0.2:
            self.events.append(FrontEvent("left", number))
            if program.chance.random() < 0.6:
                self.retried += 1
                self.ask(index, prompt, asked, retries=1)
        else:
            self.events.append(FrontEvent("taken", number))
            program.take(prompt, json.loads(body))
