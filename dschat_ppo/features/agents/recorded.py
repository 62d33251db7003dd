"""What the journal keeps of an episode that goes on: the replies of the model, and where contexts
began. After a kill its agent begins again, and gets these replies while it asks the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.features.agents.record import Context, ModelCall

_CONTEXT = "/context/"


@dataclass(frozen=True)
class RecordedReply:
    """What the model wrote in a call. `reason`: a `FinishReason`."""

    ids: list[int]
    logprobs: list[float]
    reason: int


class RecordedEpisode:
    """The entries of one episode in the journal, whose names begin with `question`; without a
    journal there are none. `next_order`: above the places in the row of all contexts that an
    earlier start began."""

    def __init__(self, journal: Journal | None = None, question: str = "", next_order: int = 0):
        self.journal = journal
        self.question = question
        self.next_order = next_order

    def begin_context(self, call: ModelCall) -> None:
        """The first call of a context that is trained: it gets the place in the row and the seed
        that it had, whatever the order in which concurrent calls come now."""
        if self.journal is None:
            return
        context: Context = call.context
        name = f"{self.question}{_CONTEXT}{call.digest}:{call.repeat}"
        entry = self.journal.known.get(name)
        if entry is not None:
            context.order = entry["order"]
            context.seed = entry["seed"]
            return
        context.order = self.next_order
        self.next_order += 1
        self.journal.add(name, {"order": context.order, "seed": context.seed})

    def reply(
        self, call: ModelCall, most_tokens: int | None, stop: Sequence[str]
    ) -> RecordedReply | None:
        """The reply to an equal call, which may write `most_tokens` and ends at the texts `stop`;
        None if there is none that fits."""
        if self.journal is None:
            return None
        entry = self.journal.known.get(self._name_of(call, most_tokens, stop))
        if entry is None or len(entry["ids"]) > call.limit:
            return None
        return RecordedReply(**entry)

    def add(
        self,
        call: ModelCall,
        most_tokens: int | None,
        stop: Sequence[str],
        reply: RecordedReply,
    ) -> None:
        """Note what the model has written."""
        if self.journal is not None:
            self.journal.add(self._name_of(call, most_tokens, stop), asdict(reply))
            self.journal.write()

    def _name_of(self, call: ModelCall, most_tokens: int | None, stop: Sequence[str]) -> str:
        settings = hashlib.sha256(json.dumps([most_tokens, list(stop)]).encode()).hexdigest()[:8]
        return f"{self.question}/reply/{call.digest}:{call.repeat}:{settings}"


def records_of(journal: Journal | None, questions: Sequence[str]) -> list[RecordedEpisode]:
    """The entries of episodes, each by its question."""
    if journal is None:
        return [RecordedEpisode() for _ in questions]
    orders = dict[str, int]()
    for name, entry in journal.known.items():
        question, _, first_call = name.partition(_CONTEXT)
        if first_call:
            orders[question] = max(orders.get(question, 0), entry["order"] + 1)
    return [RecordedEpisode(journal, question, orders.get(question, 0)) for question in questions]
