"""Buffers of all sequences of one generation, on the model's device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_ppo.models.given_embeddings import GivenEmbeddings
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.partners import OpenedSequence
from dschat_ppo.rollout.sampling import ASK_DEVICE, NucleusSearch, row_uniforms, sample
from dschat_ppo.types import FinishReason, PromptBatch, Rollout, repeat_rows

UNFINISHED = -1


class SequenceBuffers:
    """Buffers of A sequences (B prompts x `samples`), and one spare row for idle rows of a forward
    pass.

    `token_ids` (A+1, `width`) int64 holds prompt and response from column 0. `prompt_lengths`,
    `limits` (most response tokens) and `response_lengths` (0 until the sequence is finished) are
    (A+1,) int64. `finish_reasons` (A+1,) int8 is `UNFINISHED` or a `FinishReason`. `logprobs` and
    `uniforms` (numbers from which tokens are drawn) are (A+1, `response_width`) fp32. `seen` is
    (A+1, V) bool, True for tokens in the sequence, or None without a repetition penalty. `is_end`,
    `is_eos` and `is_banned` (None without banned tokens) are (V,) bool. `observed` (A+1,
    `response_width`) bool marks response tokens that the model did not choose. `stop_strings` are
    texts that end some sequences besides those of `stopping`, by sequence. `offsets` (A+1,) int64
    are what positions after the prompt add to the columns; None if nothing is given for prompts.
    """

    def __init__(
        self,
        request: RolloutRequest,
        config: GenerationConfig,
        vocabulary: int,
        slack: int,
        prompt_width: int | None = None,
    ):
        """
        Args:
            request: the sequences.
            config: how tokens are drawn, and what ends a response.
            vocabulary: V, the width of the logits.
            slack: response columns beyond `max_new_tokens`, for tokens after the end and before the
                next check.
            prompt_width: columns for prompts; None: as many as needed.
        """
        prompt_ids = request.prompts.prompt_ids
        device = prompt_ids.device
        self.samples = config.samples
        self.sampling = config.sampling
        self.stopping = config.stopping
        self.count = len(prompt_ids) * self.samples
        self.prompt_width = prompt_width or prompt_ids.shape[1]
        self.response_width = self.stopping.max_new_tokens + slack
        self.width = self.prompt_width + self.response_width + 1
        rows = self.count + 1
        self.prompt_lengths = torch.ones(rows, dtype=torch.int64, device=device)
        self.limits = torch.empty_like(self.prompt_lengths)
        self.token_ids = torch.empty(rows, self.width, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(rows, self.response_width, device=device)
        self.logprobs = torch.empty(rows, self.response_width, device=device)
        self.observed = torch.zeros(rows, self.response_width, dtype=torch.bool, device=device)
        self.response_lengths = torch.empty(rows, dtype=torch.int64, device=device)
        self.finish_reasons = torch.empty(rows, dtype=torch.int8, device=device)
        self.is_end = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.is_end[list(self.stopping.ids)] = True
        self.is_eos = torch.zeros_like(self.is_end)
        self.is_eos[list(self.stopping.eos_ids)] = True
        self.is_banned: Tensor | None = None
        if self.stopping.banned_ids:
            self.is_banned = torch.zeros_like(self.is_end)
            self.is_banned[list(self.stopping.banned_ids)] = True
        self.seen: Tensor | None = None
        if self.sampling.repetition_penalty != 1:
            self.seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        self.offsets: Tensor | None = None
        if request.given is not None:
            self.offsets = torch.zeros_like(self.prompt_lengths)
        self.fill(request)

    def fill(self, request: RolloutRequest) -> None:
        """Start again with as many prompts, none wider than `prompt_width`. All tensors stay where
        they are."""
        self.prompts = repeat_rows(request.prompts, self.samples)
        self._given = request.given
        if self.offsets is not None:
            self.offsets.zero_()
        longest = self.prompts.prompt_ids.shape[1]
        device = self.token_ids.device
        self.prompt_lengths[:-1] = self.prompts.prompt_mask.sum(dim=1)
        self.limits.fill_(self.stopping.max_new_tokens)
        if request.limits is not None:
            self.limits[:-1] = request.limits
        start = longest - self.prompt_lengths[:-1].unsqueeze(1)  # left padding of each prompt
        columns = (torch.arange(longest, device=device) + start).clamp_max(longest - 1)
        self.token_ids.zero_()
        self.token_ids[:-1, :longest] = self.prompts.prompt_ids.gather(1, columns)
        self.uniforms[:-1] = self._uniforms(request)
        self.logprobs.zero_()
        self.observed.zero_()
        self.response_lengths.zero_()
        self.finish_reasons.fill_(UNFINISHED)
        self.stop_strings = dict[int, tuple[str, ...]]()
        for sequence, stop_strings in enumerate(request.stop_strings or ()):
            self._end_with(sequence, stop_strings)
        if self.seen is not None:
            self.reset(list(range(self.count)))

    def _uniforms(self, request: RolloutRequest) -> Tensor:
        """(A, `response_width`) fp32: the numbers of each seed, after those that were drawn
        before."""
        drawn = request.drawn
        if drawn is None:
            return row_uniforms(request.seeds, self.response_width)
        uniforms = row_uniforms(request.seeds, self.response_width + int(drawn.max()))
        columns = drawn.unsqueeze(1) + torch.arange(self.response_width, device=drawn.device)
        return uniforms.gather(1, columns)

    def given(self, sequences: Sequence[int], width: int) -> GivenEmbeddings | None:
        """What the model gets for the prompts of n sequences, in the first `width` columns; None:
        nothing. It is made here, and the offsets of all sequences with these prompts are noted."""
        if self._given is None or not sequences:
            return None
        prompts = [sequence // self.samples for sequence in sequences]
        given_embeddings = self._given(prompts, width)
        if given_embeddings is not None and given_embeddings.offsets is not None:
            assert self.offsets is not None
            of_prompts = self.offsets[:-1].view(-1, self.samples)
            of_prompts[prompts] = given_embeddings.offsets.unsqueeze(1)
        return given_embeddings

    def placed(self, sequences: Tensor, columns: Tensor) -> Tensor:
        """The positions (n, L) of tokens that the model gets after prompts, at `columns` (n, L)
        int64 of n sequences."""
        if self.offsets is None:
            return columns
        return columns + self.offsets[sequences].unsqueeze(1)

    @property
    def nbytes(self) -> int:
        """Bytes of the large tensors."""
        size = self.token_ids.nbytes + self.uniforms.nbytes + self.logprobs.nbytes
        if self.seen is not None:
            size += self.seen.nbytes
        return size

    @property
    def has_stop_strings(self) -> bool:
        """Whether a text ends some sequence."""
        return bool(self.stopping.stop_strings or self.stop_strings)

    def open(self, opened: OpenedSequence) -> None:
        """Begin a sequence again, with another prompt and another seed. All tensors stay where they
        are."""
        sequence = opened.sequence
        length = len(opened.prompt_ids)
        device = self.token_ids.device
        self.token_ids[sequence, :length] = torch.tensor(list(opened.prompt_ids), device=device)
        self.prompt_lengths[sequence] = length
        uniforms = row_uniforms(torch.tensor([opened.seed]), opened.drawn + self.response_width)
        self.uniforms[sequence] = uniforms[0, opened.drawn :].to(device)
        self.observed[sequence] = False
        self.reset([sequence])

    def begin_call(
        self, sequence: int, count: int, limit: int, stop_strings: tuple[str, ...]
    ) -> None:
        """Let the call of a sequence that begins after `count` response tokens have at most `limit`
        tokens, and end with one of the `stop_strings` too."""
        self.limits[sequence] = count + limit
        self._end_with(sequence, stop_strings)

    def _end_with(self, sequence: int, stop_strings: tuple[str, ...]) -> None:
        """Let these texts end a sequence, besides those of all."""
        self.stop_strings.pop(sequence, None)
        if stop_strings:
            if self.stopping.decode is None:
                raise ValueError(f"sequence {sequence}: stop texts need `StoppingCriteria.decode`")
            self.stop_strings[sequence] = stop_strings

    def forbidden(self, counts: Tensor) -> Tensor | None:
        """(n, V) bool, True for ends that may not come after `counts` (n,) tokens, and for banned
        tokens; None without a minimum length and such tokens."""
        is_early = None
        if self.stopping.min_new_tokens and self.stopping.ids:
            is_early = (counts < self.stopping.min_new_tokens).unsqueeze(1) & self.is_end
        if self.is_banned is None:
            return is_early
        if is_early is None:
            return self.is_banned.expand(len(counts), -1)
        return is_early | self.is_banned

    def draw(
        self, logits: Tensor, sequences: Tensor, counts: Tensor, search: NucleusSearch = ASK_DEVICE
    ) -> tuple[Tensor, Tensor]:
        """A token for each of n sequences, and its log-prob (see `sample`), from logits (n, V). See
        also `append`."""
        uniforms = self.uniforms.view(-1)[sequences * self.response_width + counts]
        seen = None
        if self.seen is not None:
            seen = self.seen[sequences]
        forbidden = self.forbidden(counts)
        return sample(logits, self.sampling, uniforms, seen, forbidden, search)

    def append(self, sequences: Tensor, counts: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Append one token, `tokens` (n,) int64 with `logprobs` (n,) fp32, to each of n sequences;
        (n,) bool, True where that finishes the sequence. `sequences` (n,) int64 are rows of the
        buffers, `counts` (n,) int64 their response tokens so far."""
        columns = self.prompt_lengths[sequences] + counts
        self.token_ids.view(-1).index_copy_(0, sequences * self.width + columns, tokens)
        self.logprobs.view(-1).index_copy_(0, sequences * self.response_width + counts, logprobs)
        if self.seen is not None:
            self.seen[sequences, tokens] = True
        ended = self.is_end[tokens]
        finished = ended | (counts + 1 >= self.limits[sequences])
        reason = torch.where(self.is_eos[tokens], FinishReason.EOS, FinishReason.STOP)
        reason = torch.where(ended, reason, FinishReason.LENGTH).to(torch.int8)
        new = finished & (self.finish_reasons[sequences] == UNFINISHED)
        self.finish_reasons[sequences] = torch.where(new, reason, self.finish_reasons[sequences])
        self.response_lengths[sequences] = torch.where(
            new, counts + 1, self.response_lengths[sequences]
        )
        return finished

    def find_stop_strings(
        self, sequences: np.ndarray, counts: np.ndarray, new: int, starts: np.ndarray | None = None
    ) -> np.ndarray:
        """Cut the sequences in which one of their last tokens completed a stop string. An EOS or
        stop token that ended a sequence has precedence over a stop string that it completes.

        Args:
            sequences: (n,) int64, rows of the buffers.
            counts: (n,) int64, response tokens of each before the new ones.
            new: tokens of each since the last check.
            starts: (n,) int64, the first token of the action of each; None: 0.

        Returns:
            (n,) bool, True for the sequences that it cut.
        """
        rows = torch.from_numpy(sequences).to(self.token_ids.device)
        further = [self.stop_strings.get(sequence, ()) for sequence in sequences.tolist()]
        # tokens of each row that can take part in a stop string
        reaches = [min(self.stopping.reach(texts), self.response_width) for texts in further]
        reach = max(reaches, default=0)
        ids = self._newest_ids(rows, counts + 1 - reach, reach + new - 1)
        reasons = self.finish_reasons[rows].tolist()
        lengths = self.response_lengths[rows].tolist()
        # each new prefix of a response: its row and length, and its last tokens
        prefixes = []
        tails = []
        for row, count in enumerate(counts.tolist()):
            if not self.stopping.stop_strings and not further[row]:
                continue
            last = lengths[row]
            if reasons[row] == UNFINISHED:
                last = count + new
            action_start = 0
            if starts is not None:
                action_start = int(starts[row])
            for length in range(count + 1, last + 1):
                end = reach + length - count - 1
                tail_length = min(reaches[row], length - action_start)
                prefixes.append((row, length))
                tails.append(ids[row][end - tail_length : end])
        stopped = np.zeros(len(sequences), dtype=bool)
        completes = self.stopping.found_in_text(tails, [further[row] for row, _ in prefixes])
        for (row, length), is_complete in zip(prefixes, completes, strict=True):
            if not is_complete or stopped[row]:
                continue
            stopped[row] = True
            if length < lengths[row] or reasons[row] in (UNFINISHED, FinishReason.LENGTH):
                self.finish_reasons[int(sequences[row])] = FinishReason.STOP
                self.response_lengths[int(sequences[row])] = length
        return stopped

    def _newest_ids(self, rows: Tensor, first: np.ndarray, count: int) -> list[list[int]]:
        """`count` tokens of each of the `rows` (n,) int64, from the response token `first` (n,) on;
        where there are none, any."""
        device = self.token_ids.device
        first_columns = self.prompt_lengths[rows] + torch.from_numpy(first).to(device)
        columns = first_columns.unsqueeze(1) + torch.arange(count, device=device)
        ids: list[list[int]] = (
            self.token_ids[rows].gather(1, columns.clamp_(0, self.width - 1)).tolist()
        )
        return ids

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        """Go on after the last response token of a finished sequence with tokens that the model did
        not choose. The numbers from which the policy's own tokens are drawn stay in order, whatever
        it observes."""
        count = int(self.response_lengths[sequence])
        after = count + len(tokens)
        start = int(self.prompt_lengths[sequence]) + count
        ids = torch.tensor(list(tokens), dtype=torch.int64, device=self.token_ids.device)
        self.token_ids[sequence, start : start + len(tokens)] = ids
        self.observed[sequence, count:after] = True
        self.logprobs[sequence, count:after] = 0.0
        if self.seen is not None:  # without what was drawn after a stop string
            self.seen[sequence] = False
            self.seen[sequence, self.token_ids[sequence, : start + len(tokens)]] = True
        # The last operation that may lack memory: so it can be repeated.
        unused = self.uniforms[sequence, count : self.response_width - len(tokens)].clone()
        self.uniforms[sequence, after:] = unused
        self.response_lengths[sequence] = 0
        self.finish_reasons[sequence] = UNFINISHED

    def reset(self, sequences: list[int], counts: list[int] | None = None) -> None:
        """Forget the response tokens of some sequences, or all but the first `counts` of each."""
        self.finish_reasons[sequences] = UNFINISHED
        self.response_lengths[sequences] = 0
        if self.seen is None:
            return
        if counts is None:
            counts = [0] * len(sequences)
        prompt_lengths = self.prompt_lengths[sequences].tolist()
        for sequence, prompt_length, count in zip(sequences, prompt_lengths, counts, strict=True):
            self.seen[sequence] = False
            self.seen[sequence, self.token_ids[sequence, : prompt_length + count]] = True

    def cut(self, sequence: int, count: int, reason: int) -> None:
        """End a sequence after `count` response tokens."""
        self.response_lengths[sequence] = count
        self.finish_reasons[sequence] = reason

    def rollout(self) -> Rollout:
        """The finished responses, padded to the longest one; unfinished sequences have no response
        token."""
        return self._rollout_of(slice(self.count), self.prompts)

    def rollout_of(self, sequences: list[int]) -> Rollout:
        """The same of some sequences that were opened late."""
        if not sequences:
            return empty_rollout(self.token_ids.device)
        lengths = self.prompt_lengths[sequences].tolist()
        prompts = [
            self.token_ids[sequence, :length]
            for sequence, length in zip(sequences, lengths, strict=True)
        ]
        rows = torch.tensor(sequences, device=self.token_ids.device)
        return self._rollout_of(rows, left_padded(prompts))

    def _rollout_of(self, rows: Tensor | slice, prompts: PromptBatch) -> Rollout:
        """The responses of n sequences, which are these rows of the buffers, with their prompts."""
        lengths = self.response_lengths[rows]
        response_columns = torch.arange(int(lengths.max()), device=lengths.device)
        mask = response_columns < lengths.unsqueeze(1)  # (n, R)
        observed = self.observed[rows, : mask.shape[1]] & mask
        columns = self.prompt_lengths[rows].unsqueeze(1) + response_columns
        ids = self.token_ids[rows].gather(1, columns.clamp_max(self.width - 1))
        rollout = Rollout(
            prompt_ids=prompts.prompt_ids,
            prompt_mask=prompts.prompt_mask,
            response_ids=torch.where(mask, ids, 0),
            response_mask=mask & ~observed,
            rollout_logprobs=torch.where(mask, self.logprobs[rows, : mask.shape[1]], 0.0),
            finish_reason=self.finish_reasons[rows].clone(),
            extra=prompts.extra,
        )
        return rollout.with_lengths(lengths.clone())


def empty_rollout(device: torch.device) -> Rollout:
    """A rollout without rows."""
    ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
    reasons = torch.zeros(0, dtype=torch.int8, device=device)
    return Rollout(ids, ids.bool(), ids, ids.bool(), ids.float(), reasons)


def left_padded(rows: list[Tensor]) -> PromptBatch:
    """Rows of ids (length,), at least one, as a batch."""
    reversed_ids = [row.flip(0) for row in rows]
    reversed_masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    ids = pad_sequence(reversed_ids, batch_first=True).flip(1)
    mask = pad_sequence(reversed_masks, batch_first=True).flip(1)
    return PromptBatch(ids, mask)
