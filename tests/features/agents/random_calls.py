"""Random agents whose calls a real engine answers, and what their rows say of them."""

from collections import Counter
from dataclasses import dataclass

import torch
from random_programs import RandomFront, RandomPrograms
from transformers import PreTrainedModel

from dschat_ppo.features.agents.played import rows_of_played
from dschat_ppo.features.agents.record import EpisodeLimits
from dschat_ppo.features.agents.turns import AgentTurns
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.generator import generate_calls
from dschat_ppo.rollout.partners import ReservedSequences
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import PromptBatch, Rollout

LIMITS = EpisodeLimits(
    calls=99, contexts=6, context_length=700, prompt_length=300, response_length=3000
)
TEMPERATURE = 1.3


@dataclass
class RandomCalls:
    """`count` random agents of a shape, the number of the first is `first`; up to `most` calls of
    each run at a time."""

    name: str
    tokenizer: object
    tools: tuple
    count: int
    first: int = 0
    most: int = 3

    def answer(self, model, engine, records=None, max_over_ranks=None) -> Rollout:
        """The rows (B, R) of the episodes, whose calls `model` answers."""
        agents = RandomPrograms(self.name, self.tools)
        self.front = RandomFront(agents, self.most)
        self.turns = AgentTurns(
            agents, self.front, self.tokenizer, LIMITS, {"temperature": TEMPERATURE}
        )
        seeds = list(range(self.first, self.first + self.count))
        self.turns.start([{}] * self.count, seeds, seeds, records=records)
        ends = (self.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
        config = GenerationConfig(
            SamplingParameters(TEMPERATURE),
            StoppingCriteria(LIMITS.response_length, eos_ids=ends),
            engine=engine,
            rows=5,
        )
        reserved = ReservedSequences(
            self.count * self.turns.sequences_of_episode,
            LIMITS.context_length - 1,
            LIMITS.context_length,
        )
        generate_calls(model, reserved, config, self.turns, max_over_ranks)
        prompts = PromptBatch(torch.zeros(self.count, 1).long(), torch.ones(self.count, 1).bool())
        return rows_of_played([episode.played() for episode in self.turns.episodes], prompts)

    def taken(self, row) -> Counter:
        """How often the program of a row got a reply, by (ids of the prompt, ids of the reply)."""
        taken = self.front.agents.programs[row].taken
        return Counter((tuple(before), tuple(ids)) for before, ids in taken)


def contexts_of(rows, row):
    """(ids, whether each was chosen, its log-prob) of each context of a row, by its columns."""
    prompt = rows.prompt_ids[row][rows.prompt_mask[row]].tolist()
    contexts = [[(token_id, False, 0.0) for token_id in prompt]]
    for column in range(int(rows.response_lengths[row])):
        if int(rows.contexts[row, column]) == len(contexts):
            contexts.append([])
        chosen = bool(rows.response_mask[row, column])
        logprob = float(rows.rollout_logprobs[row, column])
        contexts[-1].append((int(rows.response_ids[row, column]), chosen, logprob))
    return [tuple(map(list, zip(*context, strict=True))) for context in contexts]


def replies_in(contexts):
    """(ids before, ids) of each run of tokens that were chosen."""
    replies = []
    for ids, chosen, _ in contexts:
        begin = None
        for column, is_chosen in enumerate([*chosen, False]):
            if is_chosen and begin is None:
                begin = column
            if not is_chosen and begin is not None:
                replies.append((tuple(ids[:begin]), tuple(ids[begin:column])))
                begin = None
    return replies


@torch.no_grad()
def worst_logprob(model: PreTrainedModel, rows: Rollout) -> float:
    """The greatest difference of the recorded log-probs of chosen tokens from those of a plain pass
    over their context."""
    worst = 0.0
    for row in range(len(rows.prompt_ids)):
        for ids, chosen, logprobs in contexts_of(rows, row):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            table = torch.log_softmax(logits.double() / TEMPERATURE, dim=-1)
            plain = table.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
            is_chosen = torch.tensor(chosen[1:])
            differences = (torch.tensor(logprobs[1:]) - plain)[is_chosen].abs()
            worst = max([worst, *differences.tolist()])
    return worst
