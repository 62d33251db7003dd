"""Norms, rotations and gated products of layers, and the scores of a head's logits, as one kernel
each, in Triton, which PyTorch's builds for GPUs bring along: half precision, without gradients,
contiguous unless a docstring says more.

PyTorch launches a kernel for each operation of a layer, and each reads and writes its numbers in
memory. Results are rounded where these operations round them, so the bits are theirs, but for the
order of the sums of a norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 512  # that share the sums of a norm's weight gradient
_NUMBERS = 2048  # that such a program holds at a time: several rows where these are short
_COLUMNS = 1024  # of one program of a gated product
_LOGITS = tl.constexpr(2048)  # that a program of a head holds at a time
_DECODE_NUMBERS = tl.constexpr(4096)  # of keys that a program of a decode step holds at a time
DECODE_PROGRAMS = 256  # that a decode step should have, two for each processor of a GPU
_SPLITS = 8  # of the tokens of a row at most
# below the largest logit: less has probability 0, and 0 x -inf would be NaN
_LOWEST = tl.constexpr(-1e4)


def _warps(block: int) -> int:
    """Groups of 32 threads for one program that holds `block` numbers."""
    return max(1, min(16, block // 256))


@triton.jit
def _norm_kernel(states, weight, normal, width, eps, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    row = tl.program_id(0).to(tl.int64) * width
    x = tl.load(states + row + columns, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    n = (
        (x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps))
        .to(normal.dtype.element_ty)
        .to(tl.float32)
    )
    tl.store(normal + row + columns, (w * n).to(normal.dtype.element_ty), mask=inside)


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(..., H) and (H,) -> (..., H): weight * (x / sqrt(mean(x^2) + eps)). (Zhang and Sennrich
    2019, equation 4)"""
    normal = torch.empty_like(states)
    width = states.shape[-1]
    block = triton.next_power_of_2(width)
    _norm_kernel[(states.numel() // width,)](
        states, weight, normal, width, eps, block, num_warps=_warps(block)
    )
    return normal


# one kernel for all numbers of rows: a `steps` of 1 would be a kernel of its own
@triton.jit(do_not_specialize=["rows", "steps"])
def _norm_backward_kernel(  # noqa: PLR0913
    states,
    weight,
    gradient,
    of_states,
    of_weight,
    rows,
    steps,
    width,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(steps):
        row = (program * steps + step) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (columns < width) & (row < rows)
        at = row * width + columns
        x = tl.load(states + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
        n = x * r
        sums += g * n
        of_x = r * (w * g - n * (tl.sum(n * w * g, axis=1, keep_dims=True) / width))
        tl.store(of_states + at, of_x.to(of_states.dtype.element_ty), mask=inside)
    total = tl.sum(sums, axis=0)[None, :]
    tl.store(of_weight + program * width + columns, total, mask=columns < width)


def rms_norm_backward(
    states: Tensor, weight: Tensor, gradient: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradients of states (..., H) and weight (H,), given that of `rms_norm` (..., H)."""
    of_states = torch.empty_like(states)
    width = states.shape[-1]
    rows = states.numel() // width
    block = triton.next_power_of_2(width)
    row_block = max(1, _NUMBERS // block)
    steps = max(1, triton.cdiv(rows, _PROGRAMS * row_block))
    programs = triton.cdiv(rows, steps * row_block)
    # programs share none
    sums = states.new_empty(programs, width, dtype=torch.float32)
    _norm_backward_kernel[(programs,)](
        states,
        weight,
        gradient,
        of_states,
        sums,
        rows,
        steps,
        width,
        eps,
        row_block,
        block,
        num_warps=_warps(row_block * block),
    )
    return of_states, sums.sum(dim=0).to(weight.dtype)


@triton.jit
def _rotation_kernel(  # noqa: PLR0913
    values,
    output,
    cos,
    sin,
    rows,
    angles,
    heads,
    kv_heads,
    half,
    BACK: tl.constexpr,
    EVERY: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    head = tl.arange(0, EVERY)[:, None]
    kind = output.dtype.element_ty
    every = heads + 2 * kv_heads
    is_rotated = head < heads + kv_heads
    inside = (head < every) & (column < half)
    # `output` holds the heads of queries of all rows, then those of keys, then those of values,
    # which are not rotated.
    before = tl.where(head < heads, 0, tl.where(is_rotated, heads, heads + kv_heads))
    offset = (
        rows * before + row * tl.where(head < heads, heads, kv_heads) + head - before
    ) * 2 * half + column
    first = (row * every + head) * 2 * half + column
    angle = (row % angles) * 2 * half + column
    a = tl.load(values + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(values + first + half, mask=inside, other=0.0).to(tl.float32)
    cos_a = tl.load(cos + angle, mask=column < half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angle + half, mask=column < half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angle, mask=column < half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angle + half, mask=column < half, other=0.0).to(tl.float32)
    if BACK:
        sin_of_a = sin_a
        sin_a = -sin_b
        sin_b = -sin_of_a
    new_a = (a * cos_a).to(kind).to(tl.float32) - (b * sin_a).to(kind).to(tl.float32)
    new_b = (b * cos_b).to(kind).to(tl.float32) + (a * sin_b).to(kind).to(tl.float32)
    tl.store(output + offset, tl.where(is_rotated, new_a, a).to(kind), mask=inside)
    tl.store(output + offset + half, tl.where(is_rotated, new_b, b).to(kind), mask=inside)


def _rotate(
    values: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, back: bool
) -> Tensor:
    """Rotate the first `heads` + `kv_heads` of `values` (n, heads + 2 kv_heads, d). In the memory
    of the result, of the same shape, the heads of queries of all rows come first, then those of
    keys, then those of values. `cos`, `sin`: (n, d), or (n / k, d) for every so many rows again."""
    rows, every, width = values.shape
    output = torch.empty_like(values)
    head_block = triton.next_power_of_2(every)
    half_block = triton.next_power_of_2(width // 2)
    _rotation_kernel[(rows,)](
        values,
        output,
        cos,
        sin,
        rows,
        len(cos),
        heads,
        kv_heads,
        width // 2,
        back,
        head_block,
        half_block,
        num_warps=_warps(head_block * half_block),
    )
    return output


def rotated_heads(
    values: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads of `values` (n, heads + 2 kv_heads, d): those of queries and of keys, rotated,
    x * cos + rotate_half(x) * sin, and those of values, (n, heads of each, d). `cos`, `sin`:
    (n, d). (Su et al. 2021, equation 34)"""
    rows, _, width = values.shape
    output = _rotate(values, cos, sin, heads, kv_heads, False).view(-1, width)
    query, key, value = output.split([rows * heads, rows * kv_heads, rows * kv_heads])
    return (
        query.view(rows, -1, width),
        key.view(rows, -1, width),
        value.view(rows, -1, width),
    )


def rotated(values: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """All heads of `values` (n, heads, L, d), rotated, laid out in memory as (n, L, heads, d).
    `cos`, `sin`: (n, L, d), or (1, L, d). `back`: the gradient of the values, given that of the
    result."""
    lines = values.transpose(1, 2).contiguous()  # (n, L, heads, d)
    line_cos = cos.contiguous().flatten(0, 1)
    line_sin = sin.contiguous().flatten(0, 1)
    output = _rotate(lines.flatten(0, 1), line_cos, line_sin, lines.shape[2], 0, back)
    return output.view(lines.shape).transpose(1, 2)


@triton.jit
def _gated_kernel(gate, up, product, width, stride, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    row = tl.program_id(0).to(tl.int64)
    a = tl.load(gate + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    silu = (a / (1 + tl.exp(-a))).to(product.dtype.element_ty).to(tl.float32)
    tl.store(product + row * width + columns, (silu * b).to(product.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(..., I) each -> (..., I): silu(gate) * up. (Shazeer 2020, equation 6) They may be the halves
    of one tensor."""
    product = gate.new_empty(gate.shape)
    width = gate.shape[-1]
    gate = gate.reshape(-1, width)
    up = up.reshape(-1, width)
    assert gate.stride() == up.stride()
    grid = len(gate), triton.cdiv(width, _COLUMNS)
    _gated_kernel[grid](gate, up, product, width, gate.stride(0), _COLUMNS)
    return product


@triton.jit
def _gated_backward_kernel(gate, up, gradient, of_gate, of_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-a))
    tl.store(
        of_gate + at, (g * b * s * (1 + a * (1 - s))).to(of_gate.dtype.element_ty), mask=inside
    )
    tl.store(of_up + at, (g * a * s).to(of_up.dtype.element_ty), mask=inside)


def swiglu_backward(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up (..., I), given that of `swiglu`."""
    of_gate = torch.empty_like(gate)
    of_up = torch.empty_like(up)
    _gated_backward_kernel[(triton.cdiv(gate.numel(), _COLUMNS),)](
        gate, up, gradient, of_gate, of_up, gate.numel(), _COLUMNS
    )
    return of_gate, of_up


@triton.jit
def _scores_kernel(logits, tokens, sums, first, width, factor):
    rows = tl.num_programs(0)
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(sums + row)
    total = tl.load(sums + rows + row)
    weighted = tl.load(sums + 2 * rows + row)
    for start in range(0, width, _LOGITS):
        columns = start + tl.arange(0, _LOGITS)
        inside = columns < width
        z = tl.load(logits + row * width + columns, mask=inside, other=-float("inf")) * factor
        before = largest
        largest = tl.maximum(before, tl.max(z, axis=0))
        z -= largest
        z = tl.where(z < _LOWEST, _LOWEST, z)  # not a maximum: NaN stays NaN
        power = tl.exp(z)
        shrink = tl.exp(before - largest)
        weighted = (weighted + (before - largest) * total) * shrink + tl.sum(power * z, axis=0)
        total = total * shrink + tl.sum(power, axis=0)
    tl.store(sums + row, largest)
    tl.store(sums + rows + row, total)
    tl.store(sums + 2 * rows + row, weighted)
    token = tl.load(tokens + row) - first
    if (token >= 0) & (token < width):
        tl.store(sums + 3 * rows + row, tl.load(logits + row * width + token) * factor)


def add_scores_(logits: Tensor, tokens: Tensor, sums: Tensor, first: int, factor: float) -> None:
    """Add a block of logits (N, columns) fp32 to the `sums` (4, N) fp32. With z the logits so far,
    times `factor`, these are the largest, z*; the sum of exp(z - z*); that of exp(z - z*) (z - z*);
    and the z of each of the `tokens` (N,) int64, once its block has come. Column 0 is that of token
    `first`. (Milakov and Gimelshein 2018, algorithm 3)"""
    rows, width = logits.shape
    assert logits.is_contiguous() and sums.is_contiguous() and sums.shape == (4, rows)
    _scores_kernel[(rows,)](logits, tokens, sums, first, width, factor, num_warps=8)


@triton.jit
def _scores_backward_kernel(logits, tokens, terms, gradient, first, width, factor):
    rows = tl.num_programs(0)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _LOGITS + tl.arange(0, _LOGITS)
    inside = columns < width
    log_total = tl.load(terms + row)
    entropy = tl.load(terms + rows + row)
    of_logprob = tl.load(terms + 2 * rows + row)
    of_entropy = tl.load(terms + 3 * rows + row)
    token = tl.load(tokens + row) - first
    z = tl.load(logits + row * width + columns, mask=inside, other=0.0) * factor
    logprob = z - log_total
    logprob = tl.where(logprob < _LOWEST, _LOWEST, logprob)
    slope = of_logprob + of_entropy * (logprob + entropy)
    of_z = tl.where(columns == token, of_logprob, 0.0) - tl.exp(logprob) * slope
    of_logits = (of_z * factor).to(gradient.dtype.element_ty)
    tl.store(gradient + row * width + columns, of_logits, mask=inside)


def scores_backward(
    logits: Tensor, tokens: Tensor, terms: Tensor, first: int, factor: float, dtype: torch.dtype
) -> Tensor:
    """The gradient of a block of logits (N, columns) fp32, in `dtype`. `terms` (4, N) fp32: the log
    of the sum of the exponentials of all logits, times `factor`, of a row; their entropy; and the
    gradients of the log-prob of its token and of the entropy. With z = factor x logits, d logprob /
    dz = onehot - p, and d entropy / dz = -p (log p + entropy). `first`: as in `add_scores_`."""
    rows, width = logits.shape
    assert logits.is_contiguous() and terms.is_contiguous() and terms.shape == (4, rows)
    gradient = torch.empty_like(logits, dtype=dtype)
    grid = rows, triton.cdiv(width, _LOGITS.value)
    _scores_backward_kernel[grid](
        logits, tokens, terms, gradient, first, width, factor, num_warps=8
    )
    return gradient


@triton.jit
def _tokens_of_row(token_offsets, window):
    """Where the tokens of a row begin, and its prefix; how many are in that; the number of the new
    token among all; and the numbers that this program reads, from a first one up to another."""
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    start = tl.load(token_offsets + rows + row)
    prefix_start = tl.load(token_offsets + 2 * rows + row)
    prefix = tl.load(token_offsets + 3 * rows + row)
    last = prefix + tl.load(token_offsets + row)
    first = tl.maximum(last + 1 - window, 0)
    size = tl.cdiv(last + 1 - first, tl.num_programs(2))
    low = first + tl.program_id(2) * size
    return start, prefix_start, prefix, last, low, tl.minimum(low + size, last + 1)


@triton.jit
def _add_tokens(scores, values, largest, total, sums):
    """The sums of a softmax with the scores (GROUP, TOKENS) and values of some tokens more."""
    before = largest
    largest = tl.maximum(before, tl.max(scores, axis=1))
    power = tl.exp(scores - largest[:, None])
    shrink = tl.exp(before - largest)
    sums = sums * shrink[:, None] + tl.dot(power.to(values.dtype), values)
    return largest, total * shrink + tl.sum(power, axis=1), sums


@triton.jit
def _decode_kernel(  # noqa: PLR0913
    query,
    key,
    value,
    keys,
    values,
    token_offsets,
    mixed,
    log_sums,
    capacity,
    group,
    width,
    scale,
    window,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    start, prefix_start, prefix, last, low, high = _tokens_of_row(token_offsets, window)
    row_head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    line = tl.program_id(1).to(tl.int64) * capacity  # of the first slot of the head
    column = tl.arange(0, WIDTH)
    in_width = column < width
    new_key = tl.load(key + row_head * width + column, mask=in_width, other=0.0)
    new_value = tl.load(value + row_head * width + column, mask=in_width, other=0.0)
    if tl.program_id(2) == 0:  # no program reads this slot
        new = (line + start + last - prefix) * width + column
        tl.store(keys + new, new_key, mask=in_width)
        tl.store(values + new, new_value, mask=in_width)
    member = tl.arange(0, GROUP)
    in_group = (member < group)[:, None] & in_width[None, :]
    heads = (row_head * group + member)[:, None] * width + column[None, :]
    q = tl.load(query + heads, mask=in_group, other=0.0)
    largest = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    sums = tl.zeros((GROUP, WIDTH), tl.float32)
    for begin in range(low, high, _DECODE_NUMBERS // WIDTH):
        token = begin + tl.arange(0, _DECODE_NUMBERS // WIDTH)
        slot = tl.where(token < prefix, prefix_start + token, start + token - prefix)
        at = (line + slot)[:, None] * width + column[None, :]
        is_old = ((token < high) & (token < last))[:, None] & in_width[None, :]
        is_new = (token == last)[:, None]
        k = tl.where(is_new, new_key[None, :], tl.load(keys + at, mask=is_old, other=0.0))
        scores = tl.where((token < high)[None, :], tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        v = tl.where(is_new, new_value[None, :], tl.load(values + at, mask=is_old, other=0.0))
        largest, total, sums = _add_tokens(scores, v, largest, total, sums)
    total = tl.maximum(total, 1e-30)  # without tokens: 0, with a weight of 0
    row_split = (row_head * tl.num_programs(2) + tl.program_id(2)) * group + member
    output = row_split[:, None] * width + column[None, :]
    tl.store(mixed + output, (sums / total[:, None]).to(mixed.dtype.element_ty), mask=in_group)
    tl.store(log_sums + row_split, largest + tl.log(total), mask=member < group)


@triton.jit
def _merge_kernel(mixed, log_sums, output, group, width, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    row_head = tl.program_id(0).to(tl.int64)
    member = tl.program_id(1)
    column = tl.arange(0, WIDTH)[None, :]
    row_split = (row_head * SPLITS + tl.arange(0, SPLITS)) * group + member
    log_sum = tl.load(log_sums + row_split)
    share = tl.exp(log_sum - tl.max(log_sum, axis=0))
    share = share / tl.sum(share, axis=0)
    mixes = tl.load(mixed + row_split[:, None] * width + column, mask=column < width, other=0.0)
    result = tl.sum(mixes * share[:, None], axis=0)[None, :]
    at = (row_head * group + member) * width + column
    tl.store(output + at, result.to(output.dtype.element_ty), mask=column < width)


def decode_step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Tensor, Tensor],
    token_offsets: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """`cpu_kernels.operations.decode_attention`, which describes the arguments, for heads of at
    most 256 numbers: (n, heads, d). The tokens of a row are divided among programs if there are few
    rows; each sums in fp32, and the results are weighted by the sums of their softmax."""
    rows, heads, _, width = query.shape
    keys, values = cache
    kv_heads, capacity = keys.shape[1:3]
    assert keys.is_contiguous() and values.is_contiguous() and token_offsets.is_contiguous()
    group = heads // kv_heads
    splits = 1
    while splits < _SPLITS and rows * kv_heads * splits < DECODE_PROGRAMS:
        splits *= 2
    output = query.new_empty(rows, heads, width)
    mixed = output
    if splits > 1:
        mixed = query.new_empty(rows, kv_heads, splits, group, width, dtype=torch.float32)
    log_sums = query.new_empty(rows, kv_heads, splits, group, dtype=torch.float32)
    width_block = max(16, triton.next_power_of_2(width))
    _decode_kernel[(rows, kv_heads, splits)](
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        keys,
        values,
        token_offsets,
        mixed,
        log_sums,
        capacity,
        group,
        width,
        scale,
        window or 2**30,
        max(16, triton.next_power_of_2(group)),
        width_block,
    )
    if splits > 1:
        _merge_kernel[(rows * kv_heads, group)](
            mixed, log_sums, output, group, width, splits, width_block
        )
    return output
