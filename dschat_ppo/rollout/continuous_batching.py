"""The fast engine: continuous batching over preallocated keys and values, with the model's own layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.models.backbone import last_logits_argument, position_arguments
from dschat_ppo.rollout.attention import Block, RolloutAttention, RolloutCache, Span, installed
from dschat_ppo.rollout.cuda_graphs import GraphedDecoder
from dschat_ppo.rollout.decode_batch import DecodeBatch
from dschat_ppo.rollout.decode_metadata import DecodeMetadata
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.memory import is_out_of_memory, warn_of_memory
from dschat_ppo.rollout.sampling import SamplingParameters, sample
from dschat_ppo.rollout.scheduler import Prefill, Scheduler
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers

Agree = Callable[[int], int]


def never() -> bool:
    """Answers are not given up."""
    return False


class ContinuousBatching:
    """Generates all `answers` with at most `rows` at work.

    Args:
        model: whole weights (or ZeRO-3 hooks that gather each layer), eval mode.
        answers: buffers; filled by `run`.
        scheduler: which answers are at work.
        sampling: how tokens are drawn.
        agree: this rank's number -> the largest of all ranks. Given where each forward pass is collective: every rank
            then makes as many passes as the busiest. None: ranks go their own way.
        poll: with a fixed store, tokens between two looks at which rows are finished.
        given_up: asked before each token; once it is true, what is not finished stays so.
    """

    def __init__(
        self, model: PreTrainedModel, answers: SequenceBuffers, scheduler: Scheduler, sampling: SamplingParameters,
        agree: Agree | None = None, poll: int = 1, cancelled: Callable[[], bool] = never,
    ):  # fmt: skip
        self.model = model
        self.answers = answers
        self.scheduler = scheduler
        self.sampling = sampling
        self.agree: Agree = agree or (lambda number: number)
        self.lockstep = agree is not None
        self.attention = RolloutAttention()
        self.cache = RolloutCache()
        self.device = answers.sequence.device
        self.poll = poll
        self.cancelled = cancelled
        self.graphed = self._graphed()

    def _graphed(self) -> GraphedDecoder | None:
        store = self.scheduler.fixed
        return GraphedDecoder(self._step, store, self.answers.count, self.poll, self.device) if store else None

    @torch.no_grad()
    def run(self) -> None:
        """Until every answer is finished, or given up. Out of memory: the answers at work begin anew, half as many."""
        with installed(self.model, self.attention):
            while self.agree(int(self.scheduler.work_left() and not self.cancelled())):
                try:
                    self._round()
                    continue
                except RuntimeError as problem:
                    if self.lockstep or not is_out_of_memory(problem) or self.scheduler.rows == 1:
                        raise
                self._shrink()  # out here nothing holds the tensors of the failed round any more
            self.attention.begin([])
        self.graphed = None  # it refers to this object and to the store: a cycle would keep the memory for a while

    def _shrink(self) -> None:
        before, after = self.scheduler.rows, max(1, self.scheduler.rows // 2)
        self.attention.begin([])
        self.graphed = None
        self.answers.restart(self.scheduler.restart(after))
        warn_of_memory(before, after)
        self.graphed = self._graphed()

    def _round(self) -> None:
        """Fill free rows, then one token for every row."""
        heartbeat()
        passes = self.scheduler.admit()
        for number in range(self.agree(len(passes))):
            if number < len(passes):
                self._prefill(passes[number])
            else:
                self._idle()
        if self.scheduler.active:
            self._decode()
        else:
            self._idle()

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """(n, L) ids -> (n, V) logits of the last column."""
        output = self.model(
            input_ids=ids,
            past_key_values=self.cache,
            use_cache=True,
            **position_arguments(self.model, positions),
            **last_logits_argument(self.model, 1),
        )
        return output.logits[:, -1]

    def _prefill(self, work: Prefill) -> None:
        leaders = torch.from_numpy(work.answers).to(self.device)
        rows, source = (torch.from_numpy(part).to(self.device) for part in (work.rows, work.source))
        self.attention.begin(Block(work.store, rows, source))
        columns = torch.arange(work.tokens, device=self.device)
        self._forward(self.answers.sequence[leaders, : work.tokens], columns.expand(len(leaders), -1))

    def _idle(self) -> None:
        """A forward pass for the sake of the other ranks."""
        if self.lockstep:
            here = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.attention.begin(Block(KVCache(1, 1), here, here))
            self._forward(here.unsqueeze(0), here.unsqueeze(0))

    def _decode(self) -> None:
        self.scheduler.make_room()
        if self.graphed is not None:
            finished, tokens = self.graphed.run(self.scheduler.banks[0]), self.graphed.poll
        else:
            lanes = DecodeMetadata.of(self.scheduler.banks, self.device)
            done = self._step(lanes, _spans(self.scheduler.banks, lanes))
            if self.answers.stopping.stop_strings:
                counts = lanes.position + 2 - self.answers.prompt_length[lanes.answer]
                done |= self.answers.stopped_by_text(lanes.answer, counts, torch.ones_like(done))
            finished, tokens = done.cpu().numpy(), 1
        self.scheduler.advance(finished, tokens)

    def _step(self, lanes: DecodeMetadata, spans: list[Span]) -> Tensor:
        """One token for every lane; returns which are finished, (n,) bool."""
        answers = self.answers
        self.attention.begin(spans)
        count = lanes.position + 1 - answers.prompt_length[lanes.answer]
        ids = answers.sequence.view(-1)[lanes.answer * answers.width + lanes.position]
        logits = self._forward(ids.unsqueeze(1), lanes.position.unsqueeze(1))
        tokens, logprobs = sample(
            logits,
            self.sampling,
            answers.uniforms.view(-1)[lanes.answer * answers.room + count],
            seen=None if answers.seen is None else answers.seen[lanes.answer],
            forbidden=answers.forbidden(count),
        )
        return answers.put(lanes.answer, count, tokens, logprobs)


def _spans(banks: list[DecodeBatch], lanes: DecodeMetadata) -> list[Span]:
    spans, first = [], 0
    for bank in banks:
        spans.append(bank.span(first, lanes.slot[first : first + len(bank)]))
        first += len(bank)
    return spans
