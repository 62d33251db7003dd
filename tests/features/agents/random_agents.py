"""Programs that call the model at random: they extend, edit, branch and compact conversations, drop
thoughts, lose replies, and make several calls at a time. And the model that answers them."""

import json
import random

from chat_tokenizers import EACH, EVERY, WITH_TOOLS, Shape, opened_by, shaped

from dschat_ppo.data.model_replies import reply_of_tokens
from dschat_ppo.data.reply_tokens import ends_in_thought
from dschat_ppo.features.agents.call_requests import chat_message
from dschat_ppo.features.agents.record import ChatPrompt, EpisodeLimits

LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "To look.", "parameters": {"properties": {}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "%s"}}\n</tool_call>'
# Qwen3 leaves the thoughts of turns out that stand before the last message of the user
_THOUGHTS = (
    "{% if m.reasoning_content and loop.index0 > ns.asked %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}"
)
DROPS_THOUGHTS = Shape(
    "{% set ns = namespace(asked=-1) %}"
    + EACH
    + "{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}"
    + EVERY
    + EACH
    + "<|im_start|>{{ m.role }}\n"
    + _THOUGHTS
    + "{{ m.content }}<|im_end|>\n"
    + EVERY
    + opened_by("<|im_start|>assistant\n"),
    "</s>",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    "\n",
)
SHAPES_OF_AGENTS = {
    "plain": (shaped("ChatML")[0], ()),
    "tools": (shaped("Hermes", WITH_TOOLS)[0], (LOOK,)),
    "drops thoughts": (shaped("Qwen3", {"Qwen3": DROPS_THOUGHTS})[0], ()),
}
WIDE = EpisodeLimits(
    calls=1000, contexts=1000, context_length=10**6, prompt_length=10**5, response_length=10**7
)


def sampled_ids(tokenizer, text, ends=True):
    """The tokens of a reply as a model may draw them: one for each byte, which no tokenizer would
    give for the text."""
    alphabet = tokenizer.backend_tokenizer.pre_tokenizer
    ids = []
    for letter in text:
        for piece, _ in alphabet.pre_tokenize_str(letter):
            ids += [tokenizer.convert_tokens_to_ids(byte) for byte in piece]
    if ends:
        ids.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return ids


def context_of(tree, row):
    """The context of a row of an episode."""
    return tree.calls[row.call_ends[0][0]].context


class RandomModel:
    """Writes replies; each has a text of its own."""

    def __init__(self, tokenizer, tools, chance: random.Random):
        self.tokenizer = tokenizer
        self.tools = tools
        self.chance = chance
        self.count = 0

    def reply(self):
        """The ids of a reply."""
        self.count += 1
        text = f"Reply {self.count}."
        if self.tools and self.chance.random() < 0.5:
            text += "".join(
                CALL % f"{self.count}{letter}" for letter in self.chance.choice("ab ac".split())
            )
        if self.chance.random() < 0.4:
            text = f"<think>\nUm {self.count}.\n</think>\n\n{text}"
        return sampled_ids(self.tokenizer, text, ends=self.chance.random() < 0.9)


def sent_message(tokenizer, tools, call, ids):
    """The message of a reply as the program gets it."""
    reply = reply_of_tokens(tokenizer, ids, tools, ends_in_thought(tokenizer, call.prompt_ids))
    message = {key: value for key, value in reply.message.items() if key != "text"}
    for number, tool_call in enumerate(message.get("tool_calls", [])):
        tool_call["id"] = f"call{call.index:03}{number:02}"
    return chat_message(message)


class RandomAgent:
    """The conversations of a program, and what it asks next."""

    def __init__(self, chance: random.Random, tools):
        self.chance = chance
        self.tools = tools
        self.conversations = []  # that end with a reply
        self.count = 0

    def said(self, role="user", **more):
        self.count += 1
        text = self.chance.choice(["What is", "Where is", "And"])
        return {"role": role, "content": f"{text} {self.count}?", **more}

    def next_prompt(self) -> ChatPrompt:
        kinds = "extend extend extend edit branch compact forget".split()
        kind = self.chance.choice(kinds)
        if not self.conversations or self.chance.random() < 0.15:
            return self.prompt([self.said("system")] * self.chance.randint(0, 1) + [self.said()])
        messages = [dict(message) for message in self.chance.choice(self.conversations)]
        if kind == "edit":
            index = self.chance.randrange(len(messages))
            messages[index]["content"] += " (edited)"
        if kind == "branch":
            ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            messages = messages[: self.chance.choice(ends) + 1]
        if kind == "compact":
            return self.prompt([self.said(), messages[-1], self.said()])
        if kind == "forget":
            for message in messages:
                message.pop("reasoning_content", None)
        calls = messages[-1].get("tool_calls", [])
        results = [self.said("tool", tool_call_id=call["id"]) for call in calls]
        if not results or self.chance.random() < 0.3:
            results.append(self.said())
        return self.prompt(messages + results)

    def prompt(self, messages) -> ChatPrompt:
        return ChatPrompt(tuple(map(chat_message, messages)), self.tools)

    def hear(self, prompt: ChatPrompt, message) -> None:
        self.conversations.append([*prompt.messages, message])


def canonical(message, with_thoughts=True) -> str:
    """What makes a message the same one, by a way of its own."""
    calls = [
        [call["function"]["name"], sorted(call["function"]["arguments"].items())]
        for call in message.get("tool_calls", [])
    ]
    thoughts = message.get("reasoning_content", "") if with_thoughts else ""
    return json.dumps([message["role"], message["content"], thoughts, calls])
