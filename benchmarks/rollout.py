"""Generation compared with Hugging Face `generate`, in one run.

    python benchmarks/rollout.py [--json FILE] [--repeats 5] [--workloads fixed varied group]
        [--shape llama-32m] [--dtype auto]

31.6 M random parameters in the format that `--dtype auto` chooses, sampling from the full
distribution at temperature 1. Each contender runs with batches of 32 and of 128 sequences; the
better one is reported. On a GPU, `--shape qwen2-0.5b --workloads long` or `--shape llama-7b
--workloads long` generates 64 sequences of 512 + 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import products
import torch
import transformers
from measure import Cost, costs, markdown, matmul_rate, peak_memory, read_bandwidth, threads, wait
from models import SHAPES, Workload, language_model, workload
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList

from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.static_steps import StepRecorder
from dschat_ppo.types import PromptBatch, repeat_rows, to_device

ROWS = (32, 128)
PROMPTS = {"fixed": 128, "varied": 128, "group": 16, "long": 64}


class AtLength(transformers.StoppingCriteria):
    """Ends each sequence of `generate` at its given length."""

    def __init__(self, prompt_length: int, lengths: Tensor):
        self.total = prompt_length + lengths

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """(n,) bool."""
        return input_ids.shape[1] >= self.total


def sample_to_lengths(model: PreTrainedModel, prompts: PromptBatch, lengths: Tensor) -> Tensor:
    """(B, P + R) tokens by Hugging Face `generate`, one padded batch, each row to its length; all
    on one device."""
    sampling = transformers.GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        pad_token_id=0,
        eos_token_id=None,
        max_new_tokens=int(lengths.max()),
    )
    return model.generate(
        input_ids=prompts.prompt_ids,
        attention_mask=prompts.prompt_mask.long(),
        generation_config=sampling,
        stopping_criteria=StoppingCriteriaList([AtLength(prompts.prompt_ids.shape[1], lengths)]),
    )


def by_transformers(model: PreTrainedModel, work: Workload, rows: int) -> None:
    """Static batches of `rows` sequences in order, each until its longest sequence is finished."""
    prompts, lengths = (
        to_device(repeat_rows(work.prompts, work.samples), model.device),
        work.answer_lengths,
    )
    for part in torch.arange(len(lengths)).split(rows):
        batch = PromptBatch(prompts.prompt_ids[part], prompts.prompt_mask[part])
        sample_to_lengths(model, batch, lengths[part].to(model.device))


def by_us(
    model: PreTrainedModel,
    work: Workload,
    rows: int,
    sampling: SamplingParameters | None = None,
    recorder: StepRecorder | None = None,
) -> None:
    """Continuous batching, including the log-probs of the sampled tokens; by default from the whole
    distribution, and without recorded steps of earlier rollouts."""
    stopping = StoppingCriteria(int(work.answer_lengths.max()))
    how = GenerationConfig(sampling or SamplingParameters(), stopping, work.samples, rows)
    device = model.device
    request = RolloutRequest(
        to_device(work.prompts, device),
        seeds=row_seeds(0, len(work.answer_lengths), 0).to(device),
        limits=work.answer_lengths.to(device),
    )
    rollout = generate(model, request, how, recorder=recorder)
    assert int(rollout.response_mask.sum()) == work.tokens


def used_weights(model: PreTrainedModel) -> int:
    """How many weights a token uses: of an embedding table that is not the head too, only one row
    is read."""
    config: Any = model.config
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return sum(weight.numel() for weight in model.parameters()) - table


def memory_limit(model: PreTrainedModel, work: Workload, most_rows: int) -> float:
    """Tokens per second if only memory reads took time: the weights once per decoding step, each
    key and value once."""
    config: Any = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    token_bytes = (
        2 * model.dtype.itemsize * config.num_hidden_layers * config.num_key_value_heads * head_dim
    )
    prompt = work.prompts.prompt_mask.sum(dim=1).repeat_interleave(work.samples)
    answer = work.answer_lengths
    own = (answer * (answer + 1) / 2).sum()
    shared = (prompt * answer).view(-1, work.samples)
    kv_bytes = float(own + shared.amax(dim=1).sum()) * token_bytes
    steps = max(float(answer.max()), work.tokens / most_rows)
    read = steps * model.dtype.itemsize * used_weights(model) + kv_bytes
    return work.tokens / read * read_bandwidth(model.device)


def compute_limit(model: PreTrainedModel, work: Workload) -> float:
    """Tokens per second if only arithmetic took time."""
    passed = float(work.prompts.prompt_mask.sum()) + work.tokens
    rate = matmul_rate(model.device, 4096, model.config.hidden_size, 2048, model.dtype)
    return work.tokens / (2 * used_weights(model) * passed) * rate


def better(
    run: Callable[[PreTrainedModel, Workload, int], None], model: PreTrainedModel, work: Workload
) -> int:
    """The batch size with which one run is faster."""
    seconds = {}
    for rows in ROWS:
        start = time.perf_counter()
        run(model, work, rows)
        wait()
        seconds[rows] = time.perf_counter() - start
    return min(seconds, key=lambda rows: seconds[rows])


def compare(
    name: str, plain: PreTrainedModel, model: PreTrainedModel, repeats: int, cores: int
) -> dict[str, Any]:
    """All results of one workload; `model` has the layers of training."""
    work = workload(name, model.config.vocab_size, PROMPTS[name])
    with threads(cores):
        rows = {
            "transformers": better(by_transformers, plain, work),
            "dschat_ppo": better(by_us, model, work),
        }
        count = products.operations_of(model, work, shares=True).generation
        rate = products.best_rate(model.device, model.config)
        limits = {
            "limit_tokens_per_s": memory_limit(model, work, max(ROWS)),
            "compute_limit_tokens_per_s": compute_limit(model, work),
        }
    runs = {
        "transformers": lambda: by_transformers(plain, work, rows["transformers"]),
        "dschat_ppo": lambda: by_us(model, work, rows["dschat_ppo"]),
    }
    found: dict[str, Cost] = costs(runs, repeats, cores)
    theirs, ours = found["transformers"], found["dschat_ppo"]
    return {
        "ratio_wall": theirs.wall / ours.wall,
        "ratio_cpu": theirs.cpu / ours.cpu,
        "tokens_per_s": work.tokens / ours.wall,
        **limits,
        "products": products.shares_of({"rollout": ours.wall}, {"rollout": count}, rate),
        "transformers_tokens_per_s": work.tokens / theirs.wall,
        "tokens_per_cpu_s": work.tokens / ours.cpu,
        "rows": rows,
        "peak_memory_gib": {name: peak_memory(run) for name, run in runs.items()},
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The table of docs/benchmarks.md."""
    header = [
        "workload",
        "HF generate, tok/s",
        "ours, tok/s",
        "ratio (wall)",
        "ratio (CPU)",
        "memory limit, tok/s",
        "arithmetic limit, tok/s",
        "rows HF / ours",
        "peak memory HF / ours, GiB",
    ]
    rows = []
    for name, r in results.items():
        memory = r["peak_memory_gib"]
        rows.append(
            [
                name,
                f"{r['transformers_tokens_per_s']:.0f}",
                f"{r['tokens_per_s']:.0f}",
                f"{r['ratio_wall']:.2f}",
                f"{r['ratio_cpu']:.2f}",
                f"{r['limit_tokens_per_s']:.0f}",
                f"{r['compute_limit_tokens_per_s']:.0f}",
                f"{r['rows']['transformers']} / {r['rows']['dschat_ppo']}",
                f"{memory['transformers']:.2f} / {memory['dschat_ppo']:.2f}",
            ]
        )
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of each contender; the median is reported"
    )
    parser.add_argument(
        "--workloads", nargs="+", default=["fixed", "varied", "group"], choices=list(PROMPTS)
    )
    parser.add_argument(
        "--shape", default="llama-32m", choices=list(SHAPES), help="shape of the random model"
    )
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, cores = SHAPES[arguments.shape], len(os.sched_getaffinity(0))
    dtype = arguments.dtype
    if dtype == "auto":
        with threads(cores):
            dtype = products.faster_dtype(shape)
    print(f"dtype: {dtype}", flush=True)
    number_format = products.FORMATS[dtype]
    plain, model = (language_model(shape, device).to(number_format) for _ in range(2))
    use_fast_layers(model)
    results = {}
    for name in arguments.workloads:
        print(
            f"{name}: finding the better batch size of each contender", file=sys.stderr, flush=True
        )
        results[name] = compare(name, plain, model, arguments.repeats, cores)
        print(name, json.dumps(results[name]), flush=True)
    print(table(results))
    print(products.table({name: found["products"] for name, found in results.items()}))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
