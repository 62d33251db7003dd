"""A loop over the rows in place of the GPU's kernel of flash attention for decode steps."""

import torch
from torch import Tensor

from dschat_ppo.rollout.decode_kernels import FlashDecode


class LoopingKernel:
    """`flash_segments`, one query after another in fp64; `calls` holds (starts, used, longest) of
    each call."""

    def __init__(self):
        self.calls = []

    def __call__(self, query, keys, values, segments, scale) -> tuple[Tensor, Tensor]:
        numbers, starts, used, longest = segments
        self.calls.append((starts[:-1].tolist(), used.tolist(), longest))
        assert {numbers.dtype, starts.dtype, used.dtype} == {torch.int32}
        assert numbers.tolist() == list(range(len(query) + 1))
        assert len(starts) == len(used) + 1 and int((starts[:-1] + used).max()) <= len(keys) == len(
            values
        )
        assert int(used.min()) > 0 and int(used.max()) <= longest
        outputs, log_sums = [], []
        for one, start, count in zip(query.double(), starts.tolist(), used.tolist(), strict=False):
            seen = slice(start, start + count)
            scores = one @ keys[seen, 0].double().T * scale
            outputs.append(torch.softmax(scores, dim=-1) @ values[seen, 0].double())
            log_sums.append(torch.logsumexp(scores, dim=-1))
        return torch.stack(outputs).to(query.dtype), torch.stack(log_sums, dim=1).float()


def flash_with(kernel) -> FlashDecode:
    return FlashDecode(kernel, (torch.float32,))
