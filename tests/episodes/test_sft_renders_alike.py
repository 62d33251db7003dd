"""A conversation as training data of step 1, and as what a rollout writes and hears: the same tokens, and the same ones
train."""

import pytest
from chat_tokenizers import SHAPES, WITH_TOOLS, shaped

from dschat_ppo.data.encode import encode_example, encode_prompt
from dschat_ppo.data.examples import Example
from dschat_ppo.episodes.environments import Turn
from dschat_ppo.episodes.observations import ObservationTokens
from dschat_ppo.episodes.tool_calls import parse_action

LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}


def user(text):
    return {"role": "user", "content": text}


def said(text, *calls):
    made = [{"type": "function", "id": number, "function": {"name": "look", "arguments": {"at": what}}}
            for number, what in calls]  # fmt: skip
    return {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})


def seen(number, text):
    return {"role": "tool", "name": "look", "tool_call_id": number, "content": text}


TALKS = {
    "Hermes": [
        user("Where?"), said("I look.", ("a", "hall"), ("b", "room")), seen("a", " no\n"), seen("b", "a lamp"),
        said("In the room."), user("And now?"), said("", ("c", "hall")), seen("c", "5"), said("Five."),
    ],
    "Llama-3": [
        user("Where?"), said("", ("a", "hall")), seen("a", "no lamp"), said("", ("b", "room")), seen("b", "a lamp"),
        said("In the room."), user("And now?"), said("There."),
    ],
    "Mistral": [
        user("Where?"), said("", ("abcdefgh1", "hall"), ("abcdefgh2", "room")), seen("abcdefgh1", "1"),
        seen("abcdefgh2", "2"), said("", ("abcdefgh3", "hall")), seen("abcdefgh3", "3"), said("In the room."),
    ],
}  # fmt: skip
PLAIN = [
    user("Where?"),
    said("In the hall."),
    user("No, that is wrong."),
    said("In the\n\nroom."),
    user("Yes."),
    said("Good."),
]


def as_data(tokenizer, talk, tools):
    """(ids, which of them train) of a row of step 1 that trains every answer."""
    found = encode_example(tokenizer, Example(talk[:-1], [talk[-1]], tools=tools), all_turns=True)
    trained = [any(start <= n < stop for start, stop in found.prompt_spans) for n in range(len(found.prompt))]
    return found.prompt + found.answers[0], trained + [True] * len(found.answers[0])


def as_episode(tokenizer, talk, tools):
    """(ids, which of them the policy chose) of an episode whose model says what the assistant says."""
    read, first = ObservationTokens(tokenizer, tools, 1000), 1
    ids = encode_prompt(tokenizer, talk[:first], tools)
    chosen = [False] * len(ids)
    while True:
        [action] = encode_example(tokenizer, Example(talk[:first], [talk[first]], tools=tools)).answers
        ids, chosen = ids + action, chosen + [True] * len(action)
        heard = []
        for message in talk[first + 1 :]:
            if message["role"] == "assistant":
                break
            heard.append(message)
        if not heard:
            return ids, chosen
        tokens = read(Turn(heard))
        ids, chosen, first = ids + tokens, chosen + [False] * len(tokens), first + 1 + len(heard)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_conversation_with_tools(name):
    tokenizer, _ = shaped(name, WITH_TOOLS)
    (ids, trained), (expected, chosen) = (make(tokenizer, TALKS[name], [LOOK]) for make in (as_data, as_episode))
    assert tokenizer.decode(ids) == tokenizer.decode(expected)
    assert (ids, trained) == (expected, chosen)


@pytest.mark.parametrize("name", SHAPES)
def test_a_conversation_with_an_environment_as_the_user(name):
    tokenizer, _ = shaped(name)
    assert as_data(tokenizer, PLAIN, []) == as_episode(tokenizer, PLAIN, [])


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_are_read_from_what_training_renders(name):
    """Also the ids by which results name them."""
    tokenizer, shape = shaped(name, WITH_TOOLS)
    message = TALKS[name][1]
    [ids] = encode_example(tokenizer, Example(TALKS[name][:1], [message], tools=[LOOK])).answers
    found = parse_action(tokenizer, tokenizer.decode(ids).removesuffix(shape.end), [LOOK])
    calls = [
        call if name == "Mistral" else {k: v for k, v in call.items() if k != "id"} for call in message["tool_calls"]
    ]
    assert (found["content"], found["tool_calls"]) == (message["content"], calls)
