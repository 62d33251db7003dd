"""Episodes of several contexts for tests: as lists, as rows, and each context alone in plain
transformers."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from tiny_models import VOCABULARY

from dschat_ppo.types import FinishReason, Rollout

BEGINNING = list(range(2, 14))  # of many prompts, long enough to be shared
FILLER = 7  # in padding
ids_of = st.lists(st.integers(2, VOCABULARY - 1), min_size=1, max_size=3)


@dataclass(frozen=True)
class Context:
    prompt: list[int]
    response: list[int]
    chosen: list[bool]  # of the response

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response

    @property
    def chosen_columns(self) -> list[int]:
        return [len(self.prompt) + t for t, chosen in enumerate(self.chosen) if chosen]


@st.composite
def contexts(draw, earlier: list[Context]) -> Context:
    """One with 1 to 3 actions and observations between them; its prompt begins as many do, goes on
    after an earlier context, or is of its own."""
    prompt = draw(ids_of)
    kind = draw(st.sampled_from(("common", "equal", "branch", "own")))
    if kind == "common":
        prompt = BEGINNING + prompt
    elif kind == "equal":
        prompt = BEGINNING
    elif kind == "branch" and earlier:
        prompt = earlier[-1].ids + prompt
    response, chosen = [], []
    for turn in range(draw(st.integers(1, 3))):
        observation = draw(ids_of) if turn else []
        action = draw(ids_of)
        response += observation + action
        chosen += [False] * len(observation) + [True] * len(action)
    if draw(st.booleans()):  # an observation that nothing follows
        response, chosen = [*response, 5], [*chosen, False]
    return Context(prompt, response, chosen)


@st.composite
def episodes(draw, rows: int = 4, most: int = 4) -> list[list[Context]]:
    """1 to `rows` episodes of 1 to `most` contexts."""
    made = []
    for _ in range(draw(st.integers(1, rows))):
        episode: list[Context] = []
        for _ in range(draw(st.integers(1, most))):
            episode.append(draw(contexts(episode)))
        made.append(episode)
    return made


def fixed_episodes() -> list[list[Context]]:
    """Three episodes with 3, 1 and 2 contexts; the second context goes on after the first."""
    first = Context([*BEGINNING, 20], [21, 22, 30, 23], [True, True, False, True])
    branch = Context([*first.ids, 31, 32], [24, 25], [True, True])
    anew = Context([40, 41], [26, 33, 34, 27, 28], [True, False, False, True, True])
    alone = Context([*BEGINNING, 20], [29, 21], [True, True])
    short = Context([42], [22], [True])
    again = Context([*BEGINNING, 20], [23, 35, 24], [True, False, True])
    return [[first, branch, anew], [alone], [short, again]]


def rollout_of(made: list[list[Context]], has_contexts: bool = True) -> Rollout:
    """The episodes as rows, by lists."""
    prompts = [episode[0].prompt for episode in made]
    responses, chosen, numbers = [], [], []
    for episode in made:
        ids, mask, number = [], [], []
        for index, context in enumerate(episode):
            prompt = context.prompt if index else []
            ids += prompt + context.response
            mask += [False] * len(prompt) + context.chosen
            number += [index] * (len(prompt) + len(context.response))
        responses.append(ids)
        chosen.append(mask)
        numbers.append(number)
    longest_prompt, longest = max(map(len, prompts)), max(map(len, responses))

    def left(row, filler):
        return [filler] * (longest_prompt - len(row)) + row

    def right(row, filler):
        return row + [filler] * (longest - len(row))

    mask = torch.tensor([right(row, False) for row in chosen])
    return Rollout(
        prompt_ids=torch.tensor([left(row, FILLER) for row in prompts]),
        prompt_mask=torch.tensor([left([True] * len(row), False) for row in prompts]),
        response_ids=torch.tensor([right(row, FILLER) for row in responses]),
        response_mask=mask,
        rollout_logprobs=-0.5 * mask.float(),
        finish_reason=torch.full((len(made),), FinishReason.STOP, dtype=torch.int8),
        contexts=torch.tensor([right(row, 0) for row in numbers], dtype=torch.int16)
        if has_contexts
        else None,
        episode_lengths=torch.tensor([len(row) for row in responses]),
    )


def tables_alone(lm, made: list[list[Context]], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs (n, V) of the distributions from which the chosen tokens are drawn, in their order,
    each context by itself."""
    tables = []
    for context in (context for episode in made for context in episode):
        logits = lm(input_ids=torch.tensor([context.ids]), use_cache=False).logits[0]
        before = [column - 1 for column in context.chosen_columns]
        tables.append(torch.log_softmax(logits[before] / temperature, dim=-1))
    return torch.cat(tables)


def logprobs_alone(lm, made: list[list[Context]], temperature: float = 1.0):
    """Log-probs and entropies (n,) of the chosen tokens, in their order, each context by itself."""
    tables = tables_alone(lm, made, temperature)
    contexts = [context for episode in made for context in episode]
    chosen = [context.ids[column] for context in contexts for column in context.chosen_columns]
    logprobs = tables.gather(1, torch.tensor(chosen).unsqueeze(1)).squeeze(1)
    return logprobs, -(tables.exp() * tables).sum(dim=1)


def values_alone(classifier, made: list[list[Context]]) -> torch.Tensor:
    """Values (n,) before the chosen tokens, in their order, each context by itself."""
    values = []
    for context in (context for episode in made for context in episode):
        states = classifier.base_model(input_ids=torch.tensor([context.ids])).last_hidden_state
        scores = classifier.score(states)[0, :, 0]
        values += [scores[column - 1] for column in context.chosen_columns]
    return torch.stack(values)
