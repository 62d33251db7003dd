"""What happens between two actions of an episode: rewards, limits, calls that cannot be read;
episodes as they are shown."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from chat_tokenizers import SHAPES, shaped
from datasets import Dataset
from tiny_experience import record
from tiny_tokenizers import tokenizer_of

from dschat_ppo.data.encode import encode_after
from dschat_ppo.data.model_replies import reply_of_text
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.features.environments.environments import Turn
from dschat_ppo.features.environments.episode_rollouts import EpisodeRollouts
from dschat_ppo.features.environments.episode_texts import episode_texts
from dschat_ppo.features.environments.observations import ObservationTokens, observed_text
from dschat_ppo.features.environments.rollouts import extension_of
from dschat_ppo.features.environments.shown_sections import sections_of
from dschat_ppo.features.environments.turns import EpisodeRecord, EpisodeTurns
from dschat_ppo.ppo.evaluation import evaluated_prompts, json_line
from dschat_ppo.ppo.response_texts import heading
from dschat_ppo.ppo.samples import printed_responses, sample_lines
from dschat_ppo.ppo.score import RewardRequests
from dschat_ppo.rewards.reward_source import Scores
from dschat_ppo.rewards.worker_pool import CallError
from dschat_ppo.types import Rollout, ScoredRollout

SEEN = "No, that\n is wrong."
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def rows_of(tokenizer, *rows):
    """A rollout of rows of (text, whether the model wrote it, reward) each."""
    ids, mask, rewards = [], [], []
    for row in rows:
        parts = [
            (encode_after(tokenizer, "", text), chosen, reward) for text, chosen, reward in row
        ]
        ids.append(torch.tensor([number for part, _, _ in parts for number in part]))
        mask.append(torch.tensor([chosen for part, chosen, _ in parts for _ in part]))
        rewards.append(
            torch.tensor(
                [r * (n == len(part)) for part, _, r in parts for n in range(1, len(part) + 1)]
            )
        )
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad(mask, batch_first=True)
    return record(
        ScoredRollout,
        mask,
        response_ids=pad(ids, batch_first=True, padding_value=5),
        turn_rewards=pad(rewards, batch_first=True),
        episode_lengths=torch.tensor([len(row) for row in ids]),
    )


def test_turns_are_the_runs_of_the_mask():
    tokenizer, _ = shaped("ChatML")
    heard = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    short = [("One turn.<|im_end|>", True, 1.0)]
    long = [
        ("First.<|im_end|>", True, 0.5),
        (heard, False, 0.0),
        (f"Well.\n{CALL}<|im_end|>", True, -1.0),
        (heard.replace("again", "x<|y|>"), False, 0.0),
        (f"{CALL}", True, 2.0),
    ]
    rows = rows_of(tokenizer, short, long)
    found = sections_of(tokenizer, rows)
    assert found == [
        [],
        [
            {"role": "model", "text": "First.", "reward": 0.5},
            {"role": "environment", "text": "again"},
            {"role": "model", "text": "Well."},
            {"role": "call", "text": CALL, "reward": -1.0},
            {"role": "environment", "text": "x<|y|>"},
            {"role": "call", "text": CALL, "reward": 2.0},
        ],
    ]
    assert [heading(part) for part in found[1][:2]] == ["model, reward 0.500", "environment"]
    assert all("reward" not in part for part in sections_of(tokenizer, replace(rows, extra={}))[1])


def test_the_prompt_of_a_later_context_is_a_section_of_its_own():
    """The second conversation follows an observation that nothing answered."""
    tokenizer, _ = shaped("ChatML")
    heard = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    begun = "<|im_start|>user\nSum up.<|im_end|>\n<|im_start|>assistant\n"
    parts = [
        ("First.<|im_end|>", True, 0.5),
        (heard, False, 0.0),
        (begun, False, 0.0),
        ("Well.<|im_end|>", True, 1.0),
        (heard, False, 0.0),
        ("Done.<|im_end|>", True, 2.0),
    ]
    rows = rows_of(tokenizer, parts)
    numbers = []
    for (text, _, _), context in zip(parts, (0, 0, 1, 1, 1, 1), strict=True):
        numbers += [context] * len(encode_after(tokenizer, "", text))
    rows = replace(rows, contexts=torch.tensor([numbers], dtype=torch.int16))
    expected = [
        {"role": "model", "text": "First.", "reward": 0.5},
        {"role": "environment", "text": "again"},
        {"role": "context", "text": "user\nSum up.\nassistant"},
        {"role": "model", "text": "Well.", "reward": 1.0},
        {"role": "environment", "text": "again"},
        {"role": "model", "text": "Done.", "reward": 2.0},
    ]
    assert sections_of(tokenizer, rows) == [expected]
    [line] = sample_lines(rows, tokenizer, ["environment"])
    assert line["turns"] == expected
    assert "    context: user" in printed_responses(1, [line]).split("\n")


def test_samples_printed_answers_and_held_out_answers_have_turns():
    tokenizer, _ = shaped("ChatML")
    heard = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    rows = rows_of(
        tokenizer,
        [("One.<|im_end|>", True, 1.0)],
        [("First.<|im_end|>", True, 0.5), (heard, False, 0.0), (f"{CALL}<|im_end|>", True, 1.0)],
    )
    plain, line = sample_lines(rows, tokenizer, ["environment"])
    turns = [
        {"role": "model", "text": "First.", "reward": 0.5},
        {"role": "environment", "text": "again"},
        {"role": "call", "text": CALL, "reward": 1.0},
    ]
    assert "turns" not in plain and line["turns"] == turns
    assert line["answer"] == f"First.\nuser\nagain\nassistant\n{CALL}", "all of it"
    assert printed_responses(1, [line]).split("\n")[3:] == [
        "    model, reward 0.500: First.",
        "    environment: again",
        f"    call, reward 1.000: {CALL}",
    ]
    token_rows = [{"row": "{}"}] * 6
    requests = RewardRequests(SimpleNamespace(names=["environment"]), token_rows, tokenizer)
    scores = Scores(torch.ones(2), torch.ones(2, 1))
    texts = episode_texts(tokenizer, rows)
    one, two = evaluated_prompts(requests, [4, 5], rows, texts, scores, [])
    assert (one.answers, two.answers) == (["One."], [f"First.\n{CALL}"]), "without observations"
    assert "turns" not in json.loads(json_line(one)) and json.loads(json_line(two))["turns"] == [
        turns
    ]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_text_of_an_observation_is_its_content(name, role):
    tokenizer, _ = shaped(name)
    for ended in (True, False):
        ids = ObservationTokens(tokenizer, [], 100)(
            Turn([{"role": role, "content": f"{SEEN}<|eot_id|>"}]), ended
        )
        assert observed_text(tokenizer, ids) == f"{SEEN}<|eot_id|>"


def test_the_text_of_an_observation_without_a_template_or_around_several_messages():
    tokenizer, _ = shaped("ChatML")
    several = ObservationTokens(tokenizer, [], 100)(
        Turn([{"role": "tool", "content": text} for text in "ab"])
    )
    assert observed_text(tokenizer, several) == "a\ntool\nb"
    assert (
        observed_text(tokenizer, encode_after(tokenizer, "", "wrong</s>\nHuman: again\n"))
        == "wrong\nHuman: again"
    )
    tokenizer.chat_template = None
    assert observed_text(tokenizer, encode_after(tokenizer, "", " wrong\n")) == "wrong"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 3.", ("It is 3.", "")),
        (f"I add.\n{CALL}\n{CALL}", ("I add.", f"{CALL}\n{CALL}")),
        ("Well.[TOOL_CALLS]add[ARGS]{}", ("Well.", "[TOOL_CALLS]add[ARGS]{}")),
        ('<|python_tag|>{"name": "add"}', ("", '<|python_tag|>{"name": "add"}')),
        ('{"name": "add", "parameters": {}}', ("", '{"name": "add", "parameters": {}}')),
        ('{"title": "add"}', ('{"title": "add"}', "")),
        ('<tool_call>{"name": "add', ("", '<tool_call>{"name": "add')),
    ],
)
def test_what_a_message_says_and_what_it_calls(text, expected):
    reply = reply_of_text(tokenizer_of("bytes"), text, None)
    assert (reply.said, reply.called) == expected


TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


class Answers:
    """Environments that answer at once, with the next of their turns."""

    def __init__(self, **turns):
        self.turns, self.asked, self.replies, self.ended = turns, [], [], []

    def step(self, number, action):
        self.asked.append(action)
        self.replies.append((number, self.turns["steps"].pop(0)))

    def finish(self, number):
        self.replies.append((number, self.turns.get("last", Turn())))

    def poll(self, seconds):
        found, self.replies = self.replies, []
        return found

    def end(self, number):
        self.ended.append(number)


def turns_with(tools=(), most=3, **turns):
    tokenizer, _ = shaped("ChatML")
    answers, record = Answers(**turns), EpisodeRecord()
    read = ObservationTokens(tokenizer, list(tools), 100)
    return EpisodeTurns(answers, read, tokenizer, most, [record]), answers, record, tokenizer


def user(text):
    return [{"role": "user", "content": text}]


def test_rewards_of_turns_and_of_the_end_belong_to_their_actions():
    turns, answers, record, tokenizer = turns_with(
        steps=[
            Turn(user("again"), reward=0.5, metrics={"n": 1.0}),
            Turn(user("right"), reward=1.0, done=True),
        ],
        last=Turn(reward=0.25, metrics={"m": 2.0}),
    )
    turns.end_turn(0, tokenizer.encode("first<|im_end|>"), 4)
    [(number, tokens)] = turns.observed(True)
    assert number == 0
    assert (
        tokenizer.decode(tokens) == "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )
    turns.end_turn(0, tokenizer.encode("second<|im_end|>"), 19)
    assert turns.observed(True) == [(0, [])] and answers.ended == []
    turns.finish()
    assert answers.ended == [0] and [action["content"] for action in answers.asked] == [
        "first",
        "second",
    ]
    assert (record.ends, record.rewards, record.metrics) == (
        [4, 19],
        [0.5, 1.25],
        {"n": 1.0, "m": 2.0},
    )
    assert [message["content"] for message in record.messages] == [
        "first",
        "again",
        "second",
        "right",
    ]


def test_an_observation_whose_template_opens_a_thought_is_followed_by_its_rest():
    turns, answers, record, tokenizer = turns_with(steps=[Turn(user("again"))] * 3)
    template = tokenizer.chat_template
    assert template.count("<|im_start|>assistant\n") == 1
    tokenizer.chat_template = template.replace("assistant\n", "assistant\n<think>\n")
    for text, content in (("first", "first"), ("Um.</think>second", "second"), ("Cut", "")):
        turns.end_turn(0, tokenizer.encode(f"{text}<|im_end|>"), 4)
        turns.observed(True) if text != "Cut" else None
        assert answers.asked[-1]["content"] == content


def test_an_episode_ends_after_the_most_turns_or_where_a_limit_cuts_it():
    turns, answers, record, tokenizer = turns_with(
        most=1, steps=[Turn(user("again"))], last=Turn(reward=2.0)
    )
    turns.end_turn(0, tokenizer.encode("x<|im_end|>"), 1)
    assert turns.observed(True) == [(0, [])]
    turns.finish()
    assert record.rewards == [2.0]
    turns, answers, record, tokenizer = turns_with(last=Turn(reward=3.0))
    turns.cut(0, 7)
    turns.finish()
    assert (record.ends, record.rewards, answers.asked, answers.ended) == ([7], [3.0], [], [0])


def test_a_call_that_cannot_be_read_is_answered_without_the_environment():
    turns, answers, record, tokenizer = turns_with(tools=[TOOL], steps=[])
    turns.end_turn(0, tokenizer.encode("<tool_call>look(</tool_call><|im_end|>"), 9)
    [(_, tokens)] = turns.observed(True)
    assert "error: the tool call is not valid JSON" in tokenizer.decode(tokens)
    assert (answers.asked, record.failed_calls, record.rewards) == ([], 1, [0.0])


def test_an_observation_that_cannot_be_rendered_ends_the_episode():
    turns, answers, record, tokenizer = turns_with(steps=[Turn(user("\ud800"), reward=1.0)])
    turns.end_turn(0, tokenizer.encode("x<|im_end|>"), 1)
    assert turns.observed(True) == [(0, [])]
    turns.finish()
    assert record.problem.startswith("answered what cannot be rendered: ") and record.rewards == [
        1.0
    ]


@pytest.mark.parametrize("when", ["step", "end"])
def test_an_environment_that_fails_ends_its_episode(when):
    failure = CallError("took longer than 2 s")
    steps = [failure] if when == "step" else [Turn(done=True, reward=1.0)]
    turns, answers, record, tokenizer = turns_with(steps=steps, last=failure)
    turns.end_turn(0, tokenizer.encode("x<|im_end|>"), 1)
    assert turns.observed(True) == [(0, [])]
    turns.finish()
    assert record.problem == "took longer than 2 s" and record.rewards == [float(when == "end")]
    assert answers.ended == [], "its process has ended already"


def test_the_log_says_why_environments_failed_and_once_how_a_tool_did(capsys):
    def failed(name, said):
        return EpisodeRecord(
            messages=[{"role": "tool", "name": name, "content": f"error: {said}"}], failed_calls=1
        )

    rollouts = object.__new__(EpisodeRollouts)
    rollouts._flag_text = "--environment e.py:E"
    rollouts._has_told = False
    records = [
        EpisodeRecord(),
        *(EpisodeRecord(problem=problem) for problem in "abacdd"),
        failed("error", "no JSON"),
    ]
    rollouts._tell([*records, failed("add", "ValueError: no")])
    rollouts._tell([failed("add", "ValueError: again")])
    *warnings, note = capsys.readouterr().out.splitlines()
    told = [("2", "(row 1 first): a"), ("1", "(row 2 first): b"), ("1", "(row 4 first): c")]
    assert [(line.split()[3], line[-16:]) for line in warnings[:3]] == told
    assert "2 more environments failed" in warnings[3] and len(warnings) == 4
    assert "the model reads: error: ValueError: no (said once" in note


def test_rewards_that_add_up_to_more_than_fp32_holds_fail_the_episode():
    tokenizer, _ = shaped("ChatML")
    process = SimpleNamespace(finish=lambda number: None, end=lambda number: None)
    record = EpisodeRecord(ends=[0], rewards=[0.0])
    turns = EpisodeTurns(process, None, tokenizer, 9, [record])
    turns._observation_of(0, Turn(reward=3e38, done=True))
    assert (record.rewards, record.problem) == ([3e38], "")
    turns._observation_of(0, Turn(reward=3e38))  # of the end
    assert record.rewards == [3e38] and "more than fp32" in record.problem


def test_a_rollout_knows_its_failed_episodes_and_the_messages_that_functions_of_trl_read():
    """Of the two rollouts that ReMax scores together, and of no older one."""
    tokenizer, _ = shaped("ChatML")
    rollouts = object.__new__(EpisodeRollouts)
    rollouts.tokenizer, rollouts.reward_sources = tokenizer, []
    rollouts._count, rollouts._last_messages, rollouts._metrics = 0, {}, []
    rollouts._has_told = rollouts._has_counted = True
    rollouts._flag_text, rollouts.episodes = "", SimpleNamespace(end_all=lambda: None)
    rollouts.journalled = None
    rollouts.observations = SimpleNamespace(invented=len)
    ended = []
    for name in ("older", "sampled", "greedy"):
        said = {"role": "assistant", "content": name, "text": f"<think>a</think>{name}"}
        records = [
            EpisodeRecord(messages=[said], ends=[0], rewards=[0.5], problem=problem)
            for problem in ("", "it broke")
        ]
        rows = rows_of(tokenizer, [("One.", True, 0.0)], [("Two.", True, 0.0)])
        turns = SimpleNamespace(records=records, finish=lambda: None)
        ended.append(rollouts.end(rows, turns, False, True))
    assert ended[1].extra["failed"].tolist() == [False, True]
    prompts = Dataset.from_dict({"row": ["{}"]})
    requests = RewardRequests(
        SimpleNamespace(names=[]), prompts, tokenizer, [extension_of(rollouts)]
    )
    found = [[text.messages for text in requests.request(rows, [0], 0).texts] for rows in ended]
    assert found == [
        [None, None],
        *([[{"role": "assistant", "content": name}]] * 2 for name in ("sampled", "greedy")),
    ]


def test_environments_that_all_fail_at_first_end_the_run():
    rollouts = object.__new__(EpisodeRollouts)
    rollouts._has_told = rollouts._has_counted = False
    rollouts._count, rollouts._last_messages = 0, {}
    rollouts.observations = SimpleNamespace(invented=lambda ids: 3 * len(ids))
    forgotten = []
    rollouts.journalled = SimpleNamespace(
        journal=SimpleNamespace(forget=lambda: forgotten.append(1), raise_problem=lambda: None)
    )
    rollouts._metrics, rollouts._flag_text, rollouts.episodes = (
        [],
        "--environment",
        SimpleNamespace(end_all=lambda: None),
    )
    one = torch.zeros(2, 1)
    chosen = torch.tensor([[True], [False]])
    rollout = Rollout(one.long(), one.bool(), one.long(), chosen, one, one[:, 0].to(torch.int8))

    def problem_of_another_rank():
        raise StorageError("no space left")

    def end(*problems, cancelled=False):
        records = [EpisodeRecord(ends=[0], rewards=[0.5], problem=problem) for problem in problems]
        return rollouts.end(
            rollout, SimpleNamespace(records=records, finish=lambda: None), cancelled, True
        )

    rollouts.journalled.journal.raise_problem = problem_of_another_rank
    with pytest.raises(StorageError, match="no space left"):
        end("x", "y", cancelled=True)
    rollouts.journalled.journal.raise_problem = lambda: None
    end("x", "y", cancelled=True)
    with pytest.raises(
        UserError, match="--environment: all environments of the first rollout failed: x"
    ):
        end("x", "y")
    assert forgotten == [1], "the next start asks again"
    assert [metrics["invented_observations"] for metrics in rollouts._metrics[-2:]] == [3, 0]
    rollouts._has_counted = False
    end("x", "")
    assert end("x", "y").extra["turn_rewards"].tolist() == [[0.5], [0.5]], (
        "later failures cost their episodes alone"
    )
