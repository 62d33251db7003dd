"""Judges for tests: a tiny model with its tokenizer, and stubs in place of the model."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from tiny_tokenizers import tokenizer_of

from dschat_ppo.features.judges.labels import LabelReader
from dschat_ppo.features.judges.prompts import JudgePrompts
from dschat_ppo.features.judges.source import JudgeReward
from dschat_ppo.features.judges.spec import parse_judge
from dschat_ppo.features.judges.verdicts import Asking
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.rewards.reward_source import RewardRequest

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(kind: str = "bytes", template: str | None = CHAT):
    made = tokenizer_of(kind)
    made.chat_template = template
    return made


@dataclass
class StubReader:
    """Gives the log-probs that a function of the question's text names, and keeps the questions."""

    tokenizer: object
    logprobs_of: object  # (text) -> one log-prob for each label
    label_ids: list = field(default_factory=list)
    asked: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    unread: str = ""
    written: list = field(default_factory=list)
    texts: list = field(default_factory=list)

    def begin(self, step) -> None:
        self.unread = ""

    def logprobs(self, questions) -> torch.Tensor:
        texts = [self.tokenizer.decode(ids) for ids in questions]
        self.texts += texts
        self.asked += len(texts)
        rows = [self.logprobs_of(text) for text in texts]
        labels = max(map(len, rows), default=2)
        return torch.tensor(rows, dtype=torch.float64).view(len(rows), labels)


def stub_judge(logprobs_of, spec: str = "J", positions: int = 4000, made=None) -> JudgeReward:
    made = made or tokenizer()
    parsed = parse_judge(spec)
    prompts = JudgePrompts(parsed, made, positions)
    return JudgeReward(Asking(prompts, 7), StubReader(made, logprobs_of))


def model_judge(model, spec: str = "J", made=None, batch_tokens: int = 4096) -> JudgeReward:
    made = made or tokenizer()
    parsed = parse_judge(spec)
    prompts = JudgePrompts(parsed, made, 4000)
    return JudgeReward(Asking(prompts, 7), LabelReader(model, prompts.label_ids, batch_tokens))


ROLLOUT = SimpleNamespace(extra={})  # stands for a rollout whose environments have not failed


def request(answers, rows=None, prompts=None, step: int = 0) -> RewardRequest:
    prompts = prompts or ["Where is the lamp?"] * len(answers)
    rows = rows or [{} for _ in answers]
    texts = [ResponseText.of(answer) for answer in answers]
    groups = [next(i for i, other in enumerate(rows) if other is row) for row in rows]
    return RewardRequest(rows, groups, lambda: (prompts, texts), step)
