"""An engine whose model writes what a script says."""

from random_agents import sampled_ids

from dschat_ppo.data.encode import decoded
from dschat_ppo.rollout.partners import EndedCall
from dschat_ppo.types import FinishReason


class ScriptedEngine:
    """Answers the calls of agents: `reply(text of the history)` is what the model writes, one token
    a byte. Checks that the agents keep to the protocol."""

    def __init__(self, tokenizer, reply):
        self.tokenizer = tokenizer
        self.reply = reply
        self.ids = {}  # of each sequence
        self.prompts = {}
        self.open = {}  # sequence -> its call
        self.calls = 0
        self.most_open = 0

    def run(self, turns, pause=lambda engine: None):
        """Answer calls until no episode is live."""
        while turns.live or self.open:
            for call in turns.observed(wait=not self.open):
                assert call.sequence in self.ids and call.sequence not in self.open
                self.ids[call.sequence] += call.ids
                self.open[call.sequence] = call
            for sequence in turns.closed():
                assert sequence in self.ids
                self.open.pop(sequence, None)
            for call in turns.opened():
                assert call.sequence not in self.open and call.prompt_ids and call.limit >= 1
                self.ids[call.sequence] = list(call.prompt_ids)
                self.prompts[call.sequence] = list(call.prompt_ids)
                self.open[call.sequence] = call
            self.most_open = max(self.most_open, len(self.open))
            pause(self)
            for sequence, call in list(self.open.items()):
                if self.end(turns, sequence, call):
                    del self.open[sequence]

    def end(self, turns, sequence, call) -> bool:
        """End a call; whether the script does so now."""
        text = self.reply(decoded(self.tokenizer, self.ids[sequence]))
        if text is None:
            return False
        ids = sampled_ids(self.tokenizer, text)
        reason = FinishReason.EOS
        for stop in call.stop_strings:
            if stop in text:
                end = text.index(stop) + len(stop)
                ids = sampled_ids(self.tokenizer, text[:end], ends=False)
                reason = FinishReason.STOP
        if len(ids) > call.limit:
            ids = ids[: call.limit]
            reason = FinishReason.LENGTH
        self.ids[sequence] += ids
        self.calls += 1
        logprobs = [-0.5 - index for index in range(len(ids))]
        end = len(self.ids[sequence]) - len(self.prompts[sequence]) - 1
        turns.end_call(EndedCall(sequence, ids, logprobs, end, reason))
        return True
