"""Programs that call the model at random times, and an oracle that answers each of their calls by
passes over its whole history, one token at a time."""

import random
from dataclasses import dataclass, field

import torch
from pooled_runs import decode
from tiny_models import VOCABULARY

from dschat_ppo.models.backbone import slot_arguments
from dschat_ppo.rollout.partners import (
    ContinuedSequence,
    EndedCall,
    OpenedSequence,
    ReservedSequences,
)
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria, row_uniforms, sample
from dschat_ppo.types import FinishReason

CONTEXTS = 2  # sequences of an episode that are trained; one more is opened again and again
PROMPT_WIDTH, MOST_TOKENS, CONTEXT_LENGTH = 40, 40, 70
SAMPLING = SamplingParameters(temperature=1.4, top_p=0.95)
STOPPING = StoppingCriteria(
    MOST_TOKENS, eos_ids=(3, 7), stop_ids=(11,), stop_strings=("dC",), decode=decode
)
SHARED_PROMPT = tuple(range(2, 38))  # long enough to be shared, asked by all episodes

Call = OpenedSequence | ContinuedSequence


def reserved_for(episodes: int) -> ReservedSequences:
    return ReservedSequences(episodes * (CONTEXTS + 1), PROMPT_WIDTH, CONTEXT_LENGTH)


class Program:
    """A random program of an episode, which depends on what the model writes, not on time."""

    def __init__(self, episode: int, plan: int):
        self.chance = random.Random(f"{plan} {episode}")
        self.first = episode * (CONTEXTS + 1)
        self.untrained = self.first + CONTEXTS
        self.turns_left = self.chance.choice([1, 4, 7])
        self.lengths = dict[int, tuple[int, int]]()  # of the prompt and the response of a sequence

    def next_calls(self, replies: list[EndedCall]) -> list[Call]:
        """The calls of a turn, which it makes together, after what ended the last ones; none at its
        end."""
        for ended in replies:
            prompt, response = self.lengths[ended.sequence]
            self.lengths[ended.sequence] = prompt, response + len(ended.ids)
            self.chance.seed(f"{self.chance.random()} {ended.ids}")
        calls = list[Call]()
        while self.turns_left and not calls:
            self.turns_left -= 1
            for sequence in range(self.first, self.untrained):
                if self.chance.random() < 0.7:
                    calls += self._call_of(sequence)
            if self.chance.random() < 0.4:
                calls.append(self._opened(self.untrained))
        return calls

    def _call_of(self, sequence: int) -> list[Call]:
        """A call of a sequence, or none if no token of it is left."""
        if sequence not in self.lengths:
            return [self._opened(sequence)]
        ids = self._ids(0, 1, 3, 12)
        prompt, response = self.lengths[sequence]
        after = response + len(ids)
        if after >= min(MOST_TOKENS, CONTEXT_LENGTH - prompt):
            return []
        self.lengths[sequence] = prompt, after
        return [ContinuedSequence(sequence, ids, **self._limits())]

    def _opened(self, sequence: int) -> OpenedSequence:
        prompt = self.chance.choice([list(SHARED_PROMPT), self._ids(1, 2, 17, 36)])
        self.lengths[sequence] = len(prompt), 0
        seed, drawn = self.chance.randrange(-(2**63), 2**63), self.chance.choice([0, 0, 5])
        return OpenedSequence(sequence, prompt, seed, drawn=drawn, **self._limits())

    def _ids(self, *counts: int) -> list[int]:
        return [self.chance.randrange(VOCABULARY) for _ in range(self.chance.choice(counts))]

    def _limits(self) -> dict:
        """A limit, and stop texts that are one token, or parts of two."""
        stop_strings = self.chance.choice([(), ("bA", "Ae"), ("aF", "gB", "cD", "fA")])
        return {"limit": self.chance.choice([1, 2, 5, 100]), "stop_strings": stop_strings}


@dataclass
class Written:
    """A sequence in the oracle."""

    opened: OpenedSequence
    tokens: list[int] = field(default_factory=list)
    chosen: list[bool] = field(default_factory=list)
    reason: FinishReason = FinishReason.LENGTH


@torch.no_grad()
def answered(model, written: Written, call: Call, sampling=SAMPLING) -> EndedCall:
    """A call by passes over its whole history without a cache; its tokens go to `written`."""
    prompt = list(written.opened.prompt_ids)
    if isinstance(call, ContinuedSequence):
        written.tokens += call.ids
        written.chosen += [False] * len(call.ids)
    most = min(MOST_TOKENS, CONTEXT_LENGTH - len(prompt)) - len(written.tokens)
    uniforms = row_uniforms(torch.tensor([written.opened.seed]), written.opened.drawn + MOST_TOKENS)
    ids, logprobs, reason = [], [], None
    while reason is None:
        row = torch.tensor([prompt + written.tokens])
        logits = model(input_ids=row, use_cache=False, **slot_arguments(model, row)).logits[:, -1]
        drawn = written.opened.drawn + sum(written.chosen)
        seen = torch.zeros(1, VOCABULARY, dtype=torch.bool)
        seen[0, row[0]] = True
        token = int(sample(logits, sampling, uniforms[:, drawn], seen)[0])
        table = torch.log_softmax(logits[0].double() / sampling.temperature, dim=0)
        ids.append(token)
        logprobs.append(float(table[token]))
        written.tokens.append(token)
        written.chosen.append(True)
        text = decode([ids])[0]
        if token in STOPPING.eos_ids:
            reason = FinishReason.EOS
        elif token in STOPPING.stop_ids:
            reason = FinishReason.STOP
        elif any(stop in text for stop in (*STOPPING.stop_strings, *call.stop_strings)):
            reason = FinishReason.STOP
        elif len(ids) == min(call.limit, most):
            reason = FinishReason.LENGTH
    written.reason = reason
    return EndedCall(call.sequence, ids, logprobs, len(written.tokens) - 1, reason)


def by_hand(model, episodes: int, plan: int, sampling=SAMPLING):
    """All sequences at the end, by number, and the calls of each turn of each episode."""
    sequences = dict[int, Written]()
    turns = list[list[list[EndedCall]]]()
    for episode in range(episodes):
        program = Program(episode, plan)
        turns.append([])
        calls = program.next_calls([])
        while calls:
            replies = list[EndedCall]()
            for call in calls:
                if isinstance(call, OpenedSequence):
                    sequences[call.sequence] = Written(call)
                replies.append(answered(model, sequences[call.sequence], call, sampling))
            turns[-1].append(replies)
            calls = program.next_calls(replies)
    return sequences, turns


class ScriptedCalls:
    """Plays the programs of some episodes: they think for a while, and make the calls of a turn
    together or one after the other. Another `schedule` changes no token."""

    def __init__(self, episodes: int, plan: int, schedule: int):
        self.chance = random.Random(schedule)
        self.programs = [Program(episode, plan) for episode in range(episodes)]
        self.unmade = [list[Call]() for _ in range(episodes)]  # calls of the turn
        self.order = [list[int]() for _ in range(episodes)]  # the sequences of the turn
        self.ended = dict[int, EndedCall]()  # of the turns in progress, by sequence
        self.turns = [list[list[EndedCall]]() for _ in range(episodes)]  # what ended in each
        self.thinking = set(range(episodes))  # about the next turn
        self.running = set(range(episodes))
        self.open_calls = set[int]()
        self.to_open = list[OpenedSequence]()
        self.to_close = list[int]()
        self.waits = list[int]()  # how many calls were open when the engine waited

    @property
    def live(self) -> int:
        return len(self.running)

    @property
    def all_wait(self) -> bool:
        return all(self.open_calls & set(self.order[episode]) for episode in self.running)

    def observed(self, wait: bool) -> list[ContinuedSequence]:
        if wait:
            self.waits.append(len(self.open_calls))
        for episode in sorted(self.thinking):
            if self.chance.random() < 0.5:
                self._think(episode)
        continued = []
        for calls in self.unmade:
            for _ in range(self.chance.randint(0, len(calls))):
                call = calls.pop(0)
                self.open_calls.add(call.sequence)
                if isinstance(call, OpenedSequence):
                    self.to_open.append(call)
                else:
                    continued.append(call)
        return continued

    def _think(self, episode: int) -> None:
        """Begin the next turn of an episode; after the last one, close some sequences."""
        replies = [self.ended.pop(sequence) for sequence in self.order[episode]]
        if replies:
            self.turns[episode].append(replies)
        calls = self.programs[episode].next_calls(replies)
        self.thinking.remove(episode)
        self.unmade[episode] = calls
        self.order[episode] = [call.sequence for call in calls]
        if not calls:
            self.running.remove(episode)
            first = episode * (CONTEXTS + 1)
            self.to_close += [first + n for n in range(self.chance.randint(0, CONTEXTS + 1))]

    def closed(self) -> list[int]:
        closing = self.to_close
        self.to_close = []
        return closing

    def opened(self) -> list[OpenedSequence]:
        opening = self.to_open
        self.to_open = []
        return opening

    def end_call(self, call: EndedCall) -> None:
        self.open_calls.remove(call.sequence)
        self.ended[call.sequence] = call
        episode = call.sequence // (CONTEXTS + 1)
        if all(sequence in self.ended for sequence in self.order[episode]):
            self.thinking.add(episode)
