"""Judges for tests: a tiny model with its tokenizer, stubs in place of the model, and a server."""

import json
import math
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch
from tiny_tokenizers import tokenizer_of

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.features.judges.addresses import AddressReader, service_of
from dschat_ppo.features.judges.checkpoint_folders import JOURNAL
from dschat_ppo.features.judges.labels import LabelReader
from dschat_ppo.features.judges.prompts import Judged, JudgePrompts
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


def label_sums(lm, judge, asked) -> torch.Tensor:
    """(answers, labels) summed log-probs of [question | label and end], row by row."""
    table_of_sums = []
    for index in range(len(asked)):
        ids = judge.asking.prompts.question(judge_input(asked, index))
        sums = []
        for label in judge.asking.prompts.label_ids:
            row = torch.tensor([[*ids, *label]])
            with torch.no_grad():
                table = lm(input_ids=row, use_cache=False).logits[0].double().log_softmax(-1)
            before = table[len(ids) - 1 : -1]
            sums.append(before.gather(1, torch.tensor(label).unsqueeze(1)).sum())
        table_of_sums.append(torch.stack(sums))
    return torch.stack(table_of_sums)


def judge_input(asked, index):
    return Judged(asked.prompts[index], asked.rows[index], asked.texts[index], 0)


def address_judge(url, settings="", timeout=5.0, journal=None, at_once=4) -> JudgeReward:
    spec = parse_judge(f"{url}{settings}")
    answers = None
    if journal is not None:
        answers = Journal(journal, JOURNAL, "judges", "judge_1")
    reader = AddressReader(spec, service_of(spec, timeout), at_once, seed=3, journal=answers)
    return JudgeReward(Asking(JudgePrompts(spec, None), 3), reader)


class Server:
    """A judge that replies with what a function of the question gives: (status, body)."""

    def __init__(self, reply):
        self.reply = reply
        self.queries, self.headers = [], []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):  # noqa: N802
                self.send(200, {"data": [{"id": "only"}]})

            def do_POST(self):  # noqa: N802
                query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.queries.append(query)
                server.headers.append(dict(self.headers))
                self.send(*server.reply(query, len(server.queries)))

            def send(self, status, body):
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


def tokens(**shares):
    top = [{"token": token, "logprob": math.log(share)} for token, share in shares.items()]
    return {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}
