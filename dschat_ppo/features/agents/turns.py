"""The calls of the agents of one rollout, between the front and the engine (`CallPartner`)."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import VARIABLES, Row
from dschat_ppo.data.model_replies import ModelReply, reply_of_tokens
from dschat_ppo.data.reply_tokens import ends_in_thought
from dschat_ppo.errors import UserError
from dschat_ppo.features.agents.call_replies import CallReply, completion_of, error_of, events_of
from dschat_ppo.features.agents.call_requests import (
    TRAINED_MODEL,
    CallRequest,
    RequestError,
    chat_message,
    clean_texts,
    read_request,
)
from dschat_ppo.features.agents.forms import AgentResult
from dschat_ppo.features.agents.front import CHAT, JSON
from dschat_ppo.features.agents.front_link import Front, FrontEvent
from dschat_ppo.features.agents.played import PlayedEpisode, cause_of_failure
from dschat_ppo.features.agents.prompt_tokens import TemplateTokens
from dschat_ppo.features.agents.record import (
    ChatPrompt,
    Context,
    EpisodeLimits,
    EpisodeTree,
    LimitError,
    ModelCall,
    TextPrompt,
    TokenPrompt,
)
from dschat_ppo.features.agents.recorded import RecordedEpisode, RecordedReply
from dschat_ppo.features.environments.episode_processes import Episodes
from dschat_ppo.rewards.worker_pool import CallError
from dschat_ppo.rollout.partners import ContinuedSequence, EndedCall, OpenedSequence
from dschat_ppo.types import FinishReason

WAIT_SECONDS = 1.0
# How long an engine without a call lets calls come, if at most such a gap is between two.
GATHER_SECONDS = 0.2
GAP_SECONDS = 0.03
COUNTED = (
    "untrained_calls",
    "refused_calls",
    "malformed_calls",
    "replaced_settings",
    "retries",
)
_EVENTS = "text/event-stream"


@dataclass(eq=False)
class AgentEpisode:
    """One episode of an agent."""

    index: int  # in its rollout
    tree: EpisodeTree
    key: str  # of its requests
    record: RecordedEpisode  # of the journal
    result: AgentResult | None = None  # None while the agent runs, and if it failed
    problem: str = ""  # why the agent could not go on
    refusal: str = ""  # the last message to a request with an error
    has_ended: bool = False  # the agent
    is_over: bool = False  # it has ended, and the front has said all of its calls
    waiting: set[int] = field(default_factory=set)  # numbers of requests that wait for the engine
    # calls of the untrained model that wait for its sequence; the first one runs
    untrained: deque[ModelCall] = field(default_factory=deque)
    counts: Counter[str] = field(default_factory=Counter)
    own_seconds: float = 0.0
    since: float | None = None  # when its own time went on; None while it stands

    def played(self) -> PlayedEpisode:
        """What is kept of the episode."""
        contexts = self.tree.rows()
        tools = list[Any]()
        reason = int(FinishReason.LENGTH)
        if contexts:
            last_index, _ = contexts[-1].call_ends[-1]
            last = self.tree.calls[last_index]
            reason = last.stop_reason
            if isinstance(last.prompt, ChatPrompt):
                tools = list(last.prompt.tools)
        counts = {name: float(self.counts[name]) for name in COUNTED}
        counts["calls"] = len(self.trained_calls)
        counts["contexts"] = len(self.tree.contexts)
        counts["own_seconds"] = self.own_seconds
        counts["failures"] = bool(self.problem)
        return PlayedEpisode(contexts, reason, self.result, self.problem, tools, counts)

    @property
    def trained_calls(self) -> list[ModelCall]:
        """The calls whose replies it took, in the order in which it made them."""
        calls = self.tree.calls
        return [call for call in calls if call.is_taken and call.context.is_trained]


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request of a program, and the call that answers it."""

    episode: AgentEpisode
    call: ModelCall
    request: CallRequest


class AgentTurns:
    """The agents of one rollout, which ask the engine whenever they like. Sequences of the engine
    are numbered: the contexts of an episode, then one for its untrained calls.

    Args:
        agents: the processes of agents.
        front: hears their requests; `agents` watch its socket.
        tokenizer: of the policy.
        limits: of each episode.
        sampling: settings of the run.
    """

    def __init__(
        self,
        agents: Episodes[AgentResult],
        front: Front,
        tokenizer: PreTrainedTokenizerBase,
        limits: EpisodeLimits,
        sampling: Mapping[str, Any],
    ):
        self.agents = agents
        self.front = front
        self.tokenizer = tokenizer
        self.limits = limits
        self.sampling = sampling
        self.first = front.admitted  # number of the first episode for the front
        self.episodes = list[AgentEpisode]()
        self.on_end: Callable[[int, PlayedEpisode], None]
        self.replaced = dict[str, tuple[Any, Any]]()  # settings of requests, and those of the run
        self.idle_seconds = 0.0  # in which no call ran
        self._asked = dict[int, _Asked]()  # by the front's number of a request
        self._requests = dict[ModelCall, CallRequest]()
        self._running = dict[int, ModelCall]()  # by sequence
        self._opened = list[OpenedSequence]()
        self._continued = list[ContinuedSequence]()
        self._closed = list[int]()
        self._used = set[int]()  # sequences that were opened
        # contexts that a sequence holds up to their last call
        self._held = set[Context]()

    @property
    def sequences_of_episode(self) -> int:
        """How many sequences of the engine an episode may have."""
        return self.limits.contexts + 1

    def start(
        self,
        rows: Sequence[Row],
        seeds: Sequence[int],
        agent_seeds: Sequence[int],
        on_end: Callable[[int, PlayedEpisode], None] = lambda index, episode: None,
        records: Sequence[RecordedEpisode] | None = None,
    ) -> None:
        """Start an agent for each row. `seeds`: of the tokens; `agent_seeds`: for the agents;
        `on_end`: hears of each episode that is over; `records`: what the journal has of each."""
        self.on_end = on_end
        records = records or [RecordedEpisode() for _ in rows]
        for index, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
            tokens = TemplateTokens(self.tokenizer, row.get(VARIABLES))
            has_first = records[index].next_order > 0
            tree = EpisodeTree(tokens, self.limits, seed, has_first)
            key = self.front.admit(self.first + index)
            episode = AgentEpisode(index, tree, key, records[index], since=time.monotonic())
            self.episodes.append(episode)
            columns = {name: value for name, value in row.items() if not name.startswith("_")}
            self.agents.begin(
                index, "play", columns, agent_seeds[index], self.front.base_url, key, TRAINED_MODEL
            )

    @property
    def live(self) -> int:
        """How many episodes are not over."""
        return sum(not episode.is_over for episode in self.episodes)

    @property
    def all_wait(self) -> bool:
        """Whether each episode whose agent runs waits for the engine."""
        return all(self.episodes[index].waiting for index in self.agents.running)

    def observed(self, wait: bool) -> list[ContinuedSequence]:
        """Hear what the agents ask, and which have ended; the calls of sequences that go on. An
        engine without a call begins with those that come one right after another: a step with many
        takes little longer than one with a single call."""
        self.front.flush()
        began = time.monotonic()
        if wait and not (self._opened or self._continued or self._closed):
            self._hear_agents(WAIT_SECONDS)
            last = time.monotonic() + GATHER_SECONDS
            while not self.all_wait and time.monotonic() < last:
                if not self._hear_agents(GAP_SECONDS):
                    break
        else:
            self._hear_agents(0.0)
        if wait:
            self.idle_seconds += time.monotonic() - began
        self.front.flush()
        continued = self._continued
        self._continued = []
        return continued

    def _hear_agents(self, seconds: float) -> bool:
        """Hear what has happened, or wait for it up to `seconds`. Whether there was anything."""
        results = self.agents.poll(seconds)
        if results or self.agents.running:
            seconds = 0.0  # else only the front can say something
        events = self.front.poll(seconds)
        for event in events:
            self._hear(event)
        for index, result in results:
            self._end_agent(index, result)
        return bool(results or events)

    def opened(self) -> list[OpenedSequence]:
        """The sequences that begin."""
        opened = self._opened
        self._opened = []
        self._used.update(sequence.sequence for sequence in opened)
        return opened

    def closed(self) -> list[int]:
        """The sequences of episodes that are over."""
        closed = self._closed
        self._closed = []
        return closed

    # What the front says

    def _hear(self, event: FrontEvent) -> None:
        if event.kind == "dismissed":
            if event.episode >= self.first:
                self._end_episode(self.episodes[event.episode - self.first])
        elif event.kind == "call":
            self._answer(event)
        else:
            asked = self._asked.pop(event.call, None)
            if asked is None:
                return
            if event.kind == "taken":
                asked.call.is_taken = True
            else:
                asked.call.is_awaited = False
                self._settle(asked.episode, event.call)

    def _answer(self, event: FrontEvent) -> None:
        """Let the engine answer a request, or say why it does not."""
        if event.episode < self.first:  # of an earlier rollout
            ended = RequestError("the episode has ended", code="invalid_api_key", status=401)
            self.front.reply(event.call, 401, json.dumps(error_of(ended)).encode())
            return
        episode = self.episodes[event.episode - self.first]
        try:
            request = read_request(event.body, event.path == CHAT, self.sampling)
            call = self._call_of(episode, request, event)
        except RequestError as problem:
            self._refuse(episode, event.call, problem)
        except LimitError as problem:
            self._refuse(episode, event.call, RequestError(str(problem), code=problem.code))
        except UserError as problem:  # of the template or the tokenizer
            self._refuse(episode, event.call, RequestError(str(problem), code="invalid_prompt"))
        else:
            self._asked[event.call] = _Asked(episode, call, request)
            self._note_replaced(episode, request)
            call.is_awaited = True
            if call.runs:
                self._wait(episode, event.call)
            else:  # that the program lost
                self._send(event.call)

    def _call_of(self, episode: AgentEpisode, request: CallRequest, event: FrontEvent) -> ModelCall:
        """The call that answers a request: a new one, or that of the request that it repeats."""
        tree = episode.tree
        prompt = request.prompt
        if request.is_chat and self.tokenizer.chat_template is None:
            raise RequestError(
                "the tokenizer has no chat template (--chat_template); /v1/completions works"
            )
        if isinstance(prompt, TokenPrompt) and max(prompt.ids) >= len(self.tokenizer):
            raise RequestError(f"the vocabulary has {len(self.tokenizer)} tokens", "prompt")
        key = hashlib.sha256(event.path.encode() + event.body).hexdigest()
        if event.retries > 0:
            lost = tree.lost(key)
            episode.counts["retries"] += 1
            if lost is not None:
                return lost
        if request.is_trained:
            call = tree.begin(prompt, request.most_tokens, key)
        else:
            call = tree.begin_untrained(prompt, request.most_tokens, key)
        self._requests[call] = request
        if call.context.is_trained:
            self._run(episode, call)
        else:
            episode.counts["untrained_calls"] += 1
            episode.untrained.append(call)
            if len(episode.untrained) == 1:
                self._run(episode, call)
        return call

    def _run(self, episode: AgentEpisode, call: ModelCall) -> None:
        """Let the journal answer a call, or give it to the engine. A context of which the engine
        holds nothing begins there with all its tokens."""
        context = call.context
        request = self._requests[call]
        is_first = call is context.calls[0]
        if is_first and context.is_trained:
            episode.record.begin_context(call)
        if context not in self._held:
            reply = episode.record.reply(call, request.most_tokens, request.stop)
            if reply is not None:
                self._end_call(episode, call, reply)
                return
        sequence = episode.index * self.sequences_of_episode + context.index
        self._running[sequence] = call
        if context in self._held:
            self._continued.append(
                ContinuedSequence(sequence, call.new_ids, call.limit, request.stop)
            )
        else:
            self._held.add(context)
            drawn = sum(len(earlier.reply_ids) for earlier in context.calls[:-1])
            self._opened.append(
                OpenedSequence(
                    sequence, call.prompt_ids, context.seed, call.limit, request.stop, drawn
                )
            )

    def _note_replaced(self, episode: AgentEpisode, request: CallRequest) -> None:
        episode.counts["replaced_settings"] += len(request.replaced)
        for name, values in request.replaced.items():
            self.replaced.setdefault(name, values)

    def _refuse(self, episode: AgentEpisode, number: int, problem: RequestError) -> None:
        episode.counts["refused_calls"] += 1
        episode.refusal = str(problem)
        self.front.reply(number, problem.status, json.dumps(error_of(problem)).encode())

    # The clocks of agents

    def _wait(self, episode: AgentEpisode, number: int) -> None:
        """A request waits for the engine: the agent's time stands."""
        episode.waiting.add(number)
        self.agents.stop_clock(episode.index)
        if episode.since is not None:
            episode.own_seconds += time.monotonic() - episode.since
            episode.since = None

    def _settle(self, episode: AgentEpisode, number: int) -> None:
        """A request waits no longer; the agent's time goes on if none does."""
        episode.waiting.discard(number)
        if not episode.waiting and episode.since is None and not episode.has_ended:
            episode.since = time.monotonic()
            self.agents.start_clock(episode.index)

    # What the engine says

    def end_call(self, ended: EndedCall) -> None:
        """The model has ended a call: its reply goes to the journal and to the program."""
        call = self._running.pop(ended.sequence)
        episode = self.episodes[ended.sequence // self.sequences_of_episode]
        request = self._requests[call]
        reply = RecordedReply(ended.ids, ended.logprobs, int(ended.reason))
        episode.record.add(call, request.most_tokens, request.stop, reply)
        self._end_call(episode, call, reply)

    def _end_call(self, episode: AgentEpisode, call: ModelCall, ended: RecordedReply) -> None:
        """A call has its reply."""
        request = self._requests[call]
        read = self._read(call, request, ended.ids)
        episode.counts["malformed_calls"] += bool(read.malformed)
        message = self._message(episode, read, request)
        known: Any = TextPrompt("")
        if isinstance(call.prompt, ChatPrompt):
            sent = chat_message(clean_texts(message))
            known = ChatPrompt((*call.prompt.messages, sent), call.prompt.tools)
        elif isinstance(call.prompt, TextPrompt):
            known = TextPrompt(call.prompt.text + message["content"])
        else:
            known = TokenPrompt((*call.prompt_ids, *ended.ids))
        finish_reason = "stop"
        if ended.reason == FinishReason.LENGTH:
            finish_reason = "length"
        elif message.get("tool_calls"):
            finish_reason = "tool_calls"
        call.message = message
        call.finish_reason = finish_reason
        call.stop_reason = ended.reason
        episode.tree.end(call, ended.ids, ended.logprobs, known, read.stop_text)
        for request_number, asked in list(self._asked.items()):
            if asked.call is call:
                self._send(request_number)
        if not call.context.is_trained:
            episode.untrained.popleft()
            if episode.untrained:
                self._run(episode, episode.untrained[0])

    def _read(self, call: ModelCall, request: CallRequest, ids: Sequence[int]) -> ModelReply:
        """What the tokens of a reply are."""
        if not request.is_chat:
            return reply_of_tokens(self.tokenizer, ids, (), stop=request.stop)
        tools: Sequence[Any] = ()
        if request.may_call and isinstance(request.prompt, ChatPrompt):
            tools = request.prompt.tools
        is_opened = ends_in_thought(self.tokenizer, call.prompt_ids)
        return reply_of_tokens(self.tokenizer, ids, tools, is_opened, request.stop)

    @staticmethod
    def _message(episode: AgentEpisode, read: ModelReply, request: CallRequest) -> dict[str, Any]:
        """The message of a reply. Calls without an id get one of nine characters, as Mistral's
        have."""
        if not request.is_chat:
            return {"role": "assistant", "content": read.text}
        message = {**read.message}
        message.pop("text", None)
        if read.calls:
            message["tool_calls"] = []
            for call in read.calls:
                call_id = call.get("id") or f"call{episode.counts['ids']:05}"
                episode.counts["ids"] += 1
                message["tool_calls"].append({**call, "id": call_id})
        return message

    def _send(self, number: int) -> None:
        """Send the reply of a call that has ended to a request."""
        asked = self._asked[number]
        call = asked.call
        request = asked.request
        texts = list[str]()
        if request.wants_logprobs:
            texts = [str(self.tokenizer.decode([token_id])) for token_id in call.reply_ids]
        reply = CallReply(
            call.message, call.finish_reason, call.prompt_ids, call.reply_ids, call.logprobs, texts
        )
        completion = completion_of(reply, request, call.index, int(time.time()))
        if request.streams:
            body = b"".join(events_of(completion, request.streams_usage))
            self.front.reply(number, 200, body, _EVENTS)
        else:
            self.front.reply(number, 200, json.dumps(completion).encode(), JSON)
        self._settle(asked.episode, number)

    # The ends of agents and episodes

    def _end_agent(self, index: int, result: AgentResult | CallError) -> None:
        """An agent has ended. Its episode ends when the front has said all that it knows of it."""
        episode = self.episodes[index]
        if episode.since is not None:
            episode.own_seconds += time.monotonic() - episode.since
            episode.since = None
        if isinstance(result, CallError):
            episode.problem = cause_of_failure(str(result), episode.refusal)
        else:
            episode.result = result
            self.agents.end(index)
        episode.has_ended = True
        self.front.dismiss(episode.key, self.first + index)

    def _end_episode(self, episode: AgentEpisode) -> None:
        """An episode is over: its sequences close."""
        episode.is_over = True
        episode.waiting.clear()
        episode.untrained.clear()
        first = episode.index * self.sequences_of_episode
        sequences = range(first, first + self.sequences_of_episode)
        self._opened = [call for call in self._opened if call.sequence not in sequences]
        self._continued = [call for call in self._continued if call.sequence not in sequences]
        for sequence in sequences:
            self._running.pop(sequence, None)
            if sequence in self._used:
                self._closed.append(sequence)
        taken = len(episode.trained_calls)
        rewards: list[float] | None = None
        if episode.result is not None:
            rewards = episode.result.call_rewards
        if not taken and not episode.problem:
            episode.problem = "it took no reply of the model that is trained"
        elif rewards is not None and len(rewards) != taken:
            episode.problem = f"it returned {len(rewards)} call_rewards for {taken} trained calls"
        self.on_end(episode.index, episode.played())
