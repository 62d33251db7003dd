"""How a lack of memory is recognised, and what to change then; docs/memory.md says what each flag moves."""

from __future__ import annotations

_MESSAGES = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_CHECKPOINTING = "gradient checkpointing (--gradient_checkpointing; step 3: --actor_gradient_checkpointing)"
_SMALLER = "smaller micro-batches (--per_device_train_batch_size; step 3: --micro_batch_tokens)"
_DIVIDED = "ZeRO stage 3 (--zero_stage 3; step 3: --actor_zero_stage 3 --critic_zero_stage 3), --offload_optimizer"
_ADVICE = {  # by phase; the cheapest flag first
    "train": f"{_SMALLER}, {_CHECKPOINTING}, {_DIVIDED}",
    "score": "a smaller --micro_batch_tokens, --actor_zero_stage 3 --critic_zero_stage 3, --offload_reference_model",
    "rollout": "--sleep_in_rollout, --inference_tp_size with several GPUs, --unpin_actor_parameters at ZeRO stage 3, "
    "or shorter rows (--max_answer_seq_len)",
    "load models": f"{_DIVIDED}; for the actor's whole weights, which step 3 generates with, --sleep_in_rollout or "
    "--unpin_actor_parameters",
}
_OTHERWISE = f"{_DIVIDED}, smaller batches"


def ran_out_of_memory(problem: BaseException) -> bool:
    """Whether memory ran out, also if another error replaced that one, as at the end of a CUDA graph capture."""
    seen: BaseException | None = problem
    while seen is not None:
        of_torch = type(seen).__name__ == "OutOfMemoryError" or any(message in str(seen) for message in _MESSAGES)
        if isinstance(seen, MemoryError) or (isinstance(seen, RuntimeError) and of_torch):  # torch is not imported here
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def memory_advice(phase: str) -> str:
    """One line that names the flags that help if memory runs out in this phase."""
    return f"out of memory in phase '{phase}'; what helps, the cheapest first: {_ADVICE.get(phase, _OTHERWISE)}"
