"""The fixed costs of a PPO step of the quickstart's model: what a step does besides its arithmetic, on each rank.

    python benchmarks/step_costs.py [--ranks 1 2] [--flags "--actor_zero_stage 2 ..."] [--json FILE]
        [--before FILE [--docs docs/benchmarks.md]]

The real step 3 runs with the quickstart's flags on its untrained models. Some of its PPO steps are measured, each from
the end of the step before. In one every operator is counted: collectives by kind, bytes and caller, reads of single
numbers (for which a host would wait for a GPU), kernels of the optimizer, CPU seconds of `ARITHMETIC` and `ATTENTION`.
One is profiled: calls of Python functions, and CPU seconds (which the profiler inflates where functions are short) by
phase and library. The last ones run undisturbed, for the CPU seconds of the process; without those of the arithmetic
they are the fixed costs. Numbers are those of rank 0, with one thread. What happens between the phases counts as
"train" in the counts, and as "other" in the profile.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from measure import write_docs
from op_counts import PACKAGE, Operators, caller
from step_cost_tables import MARKS, summary, tables
from torch import Tensor
from trajectories import free_port
from transformers import AutoConfig, AutoModelForSequenceClassification

from dschat_ppo.common import dist
from dschat_ppo.common.phases import PhaseClock, current_phase
from dschat_ppo.config.cli import parse
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.ppo.report import PPOReport
from dschat_ppo.run.launch import leave
from dschat_ppo.tools import toy

QUICKSTART = (
    "--data_split 0,0,1 --max_prompt_seq_len 64 --max_answer_seq_len 48 --ppo_epochs 2 --actor_learning_rate 1.5e-4 "
    "--critic_learning_rate 2e-4 --num_warmup_steps 2 --actor_zero_stage 3 --critic_zero_stage 3 --dtype bf16 "
    "--enable_test_mode --test_stop_step 7"
)
COUNTED, PROFILED = 3, 4  # PPO steps; the ones before warm up
PLAIN = (5, 6, 7)  # undisturbed PPO steps, of which the cheapest counts
ARITHMETIC = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise", "aten::_fused_adamw_",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip
ATTENTION = ("causal_attention", "causal_attention_backward", "decode_attention")  # kernels of this project
DEEPSPEED = str(Path(deepspeed.__file__).parent)
LIBRARIES = ("dschat_ppo", "deepspeed", "transformers", "torch")
OPTIMIZER = ("aten::_fused_adamw_", "aten::_foreach_norm", "aten::linalg_vector_norm")
# What the counts are called: a function's file (its end) and name
FUNCTIONS = {
    "module hooks of ZeRO-3": [
        ("zero/parameter_offload.py", name) for name in (
            "_pre_forward_module_hook", "_post_forward_module_hook", "_pre_backward_module_hook",
            "_post_backward_module_hook", "_run_before_backward_function", "_run_after_backward_function",
        )
    ],
    "submodules fetched": [("zero/partitioned_param_coordinator.py", "fetch_sub_module")],
    "submodules released": [("zero/partitioned_param_coordinator.py", "release_sub_module")],
    "gathers of weights": [("zero/partition_parameters.py", "all_gather_coalesced")],
    "gradient buckets reduced": [("zero/stage3.py", "__reduce_and_partition_ipg_grads")],
    "metric reductions": [("monitor/metric_sums.py", "reduce")],
    "collectives of this project": [
        ("common/dist.py", name) for name in ("all_reduce", "gather_cat", "gather_objects", "barrier")
    ],
    "optimizer steps": [("run/engine.py", "step")],
    "forward passes of models": [("run/engine.py", "forward")],
}  # fmt: skip


class Costs:
    """What a rank does in two PPO steps."""

    def __init__(self) -> None:
        self.collectives: Counter[tuple[str, str, str]] = Counter()  # (phase, kind, caller) -> calls
        self.bytes: Counter[tuple[str, str, str]] = Counter()
        self.reads: Counter[tuple[str, str]] = Counter()  # (phase, caller) -> calls
        self.operators: Counter[tuple[str, str]] = Counter()  # (phase, name) -> calls
        self.profiles: dict[str, cProfile.Profile] = defaultdict(lambda: cProfile.Profile(time.process_time))
        self.running: list[str] = []  # phases that are profiled, the innermost last
        self.arithmetic = 0.0  # CPU seconds of `ARITHMETIC`
        self.undisturbed: list[float] = []  # CPU seconds of the process in each of `PLAIN`
        self.began = 0.0  # CPU seconds of the process before the step in flight

    def see(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Count an operator."""
        phase = current_phase()
        self.operators[phase, name] += 1
        if name == "aten::_local_scalar_dense":
            self.reads[phase, caller(PACKAGE, DEEPSPEED)] += 1
        if name.startswith("c10d::") and name != "c10d::barrier":
            key = (phase, name.removeprefix("c10d::").strip("_"), caller(PACKAGE, DEEPSPEED))
            self.collectives[key] += 1
            self.bytes[key] += sum(tensor.nbytes for tensor in _tensors(arguments[0]))

    @contextmanager
    def timing_kernels(self) -> Iterator[None]:
        """Count the time of attention kernels, which are no operators of PyTorch, as arithmetic."""
        own = {name: getattr(operations, name) for name in ATTENTION}

        def timed(kernel: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                start = time.thread_time()
                result = kernel(*arguments)
                self.arithmetic += time.thread_time() - start
                return result

            return run

        for name, kernel in own.items():
            setattr(operations, name, timed(kernel))
        try:
            yield
        finally:
            for name, kernel in own.items():
                setattr(operations, name, kernel)

    def took(self, name: str, seconds: float) -> None:
        """Count the time of an operator."""
        if name in ARITHMETIC:
            self.arithmetic += seconds

    def profile(self, phase: str) -> None:
        """Profile under this name from now on."""
        if self.running:
            self.profiles[self.running[-1]].disable()
        self.running.append(phase)
        self.profiles[phase].enable()

    def end_profile(self) -> None:
        """Return to the profile of the phase around."""
        self.profiles[self.running.pop()].disable()
        if self.running:
            self.profiles[self.running[-1]].enable()

    def calls(self) -> dict[str, int]:
        """Calls of `FUNCTIONS` in the profiled step."""
        found: Counter[str] = Counter()
        for profile in self.profiles.values():
            for (file, _, name), (_, calls, *_) in _stats(profile).items():
                for title, functions in FUNCTIONS.items():
                    if any(file.endswith(end) and name == wanted for end, wanted in functions):
                        found[title] += calls
        return {title: found[title] for title in FUNCTIONS}

    def seconds(self) -> dict[str, dict[str, float]]:
        """Phase -> library -> CPU seconds in its own code in the profiled step."""
        found: dict[str, Counter[str]] = {phase: Counter() for phase in self.profiles}
        for phase, profile in self.profiles.items():
            for function, (_, _, own, *_) in _stats(profile).items():
                found[phase][library_of(*function)] += own
        return {phase: dict(libraries) for phase, libraries in found.items()}

    def dearest(self, count: int) -> list[tuple[str, int, float]]:
        """(function, calls, CPU seconds in it) of the functions with the most, in all phases together."""
        calls, own = Counter[str](), Counter[str]()
        for profile in self.profiles.values():
            for (file, _, name), (_, number, seconds, *_) in _stats(profile).items():
                key = f"{Path(file).name}:{name}" if file != "~" else name
                calls[key] += number
                own[key] += seconds
        return [(name, calls[name], seconds) for name, seconds in own.most_common(count)]

    def results(self, layers: int) -> dict[str, Any]:
        """All numbers, for JSON."""
        kinds = Counter({(phase, kind): 0 for phase, kind, _ in self.collectives})
        sizes = Counter(kinds)
        for (phase, kind, _), number in self.collectives.items():
            kinds[phase, kind] += number
        for (phase, kind, _), number in self.bytes.items():
            sizes[phase, kind] += number
        calls, by_phase = self.calls(), Counter[str]()
        layer_passes = layers * max(1, calls["forward passes of models"])
        for (phase, _), number in self.operators.items():
            by_phase[phase] += number
        updates = {name: sum(n for (_, op), n in self.operators.items() if op == name) for name in OPTIMIZER}
        return {
            "collectives": {f"{phase} {kind}": [n, sizes[phase, kind]] for (phase, kind), n in kinds.most_common()},
            "collectives_by_caller": [
                [*key, number, self.bytes[key]] for key, number in self.collectives.most_common(30)
            ],
            "gathers_per_layer_and_pass": calls["gathers of weights"] / layer_passes,
            "reads": sum(self.reads.values()),
            "reads_by_caller": [[*key, number] for key, number in self.reads.most_common(30)],
            "operators": dict(by_phase.most_common()),
            "operators_by_name": [[*key, number] for key, number in self.operators.most_common(60)],
            "optimizer_kernels": updates,
            "calls": calls,
            "step_seconds": {
                "a step": min(self.undisturbed, default=0.0), "its arithmetic": self.arithmetic,
                "fixed costs": min(self.undisturbed, default=0.0) - self.arithmetic,
            },
            "cpu_seconds": self.seconds(),
            "dearest": self.dearest(40),
        }  # fmt: skip


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _stats(profile: cProfile.Profile) -> dict[tuple[str, int, str], Any]:
    return pstats.Stats(profile).stats  # type: ignore[attr-defined]


def library_of(file: str, line: int, name: str) -> str:
    """The library of a function, as the profiler names it: C++ of torch is "torch (C++)"; the time of this project's
    kernels counts for the functions that call them."""
    if file.endswith("cpu_kernels/operations.py"):
        return "kernels (C++)"
    if file == "~":
        return "torch (C++)" if "torch" in name else "Python"
    if file.startswith(PACKAGE):
        return LIBRARIES[0]
    return next((name for name in LIBRARIES[1:] if f"/{name}/" in file), "Python")


@contextmanager
def measuring(costs: Costs) -> Iterator[None]:
    """Measure the PPO steps `COUNTED` and `PROFILED` of a run in the block; a step ends where its report does."""
    finish, phase, operators = PPOReport.finish, PhaseClock.phase, Operators(costs.see, costs.took)
    counting = ExitStack()

    def finished(self: PPOReport, step: int) -> None:
        finish(self, step)
        if step == COUNTED - 1:
            counting.enter_context(operators)
            counting.enter_context(costs.timing_kernels())
        if step == COUNTED:
            counting.close()
            costs.profile("other")
        if step == PROFILED:
            costs.end_profile()
        if step in PLAIN:
            costs.undisturbed.append(time.process_time() - costs.began)
        costs.began = time.process_time()

    @contextmanager
    def profiled(self: PhaseClock, name: str) -> Iterator[None]:
        if costs.running:
            costs.profile(name)
        with phase(self, name):
            yield
        if costs.running:
            costs.end_profile()

    PPOReport.finish, PhaseClock.phase = finished, profiled  # type: ignore[method-assign]
    try:
        yield
    finally:
        PPOReport.finish, PhaseClock.phase = finish, phase  # type: ignore[method-assign]


def make_models(folder: Path) -> None:
    """The quickstart's model and data, and a reward model of the same size."""
    toy.make(folder, 1234)
    config = AutoConfig.from_pretrained(folder / "model", num_labels=1)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    for file in (folder / "model").glob("tokenizer*"):
        (folder / "reward" / file.name).write_bytes(file.read_bytes())
    (folder / "reward" / "chat_template.jinja").write_text(toy.CHAT_TEMPLATE)


def work(folder: Path, flags: str) -> None:
    """The run of one rank. Rank 0 writes `costs.json`."""
    from dschat_ppo.ppo.train_ppo import train_ppo

    rows = 32 // dist.world_size()
    sizes = f"--per_device_generation_batch_size {2 * rows} --per_device_training_batch_size {rows}"
    words = f"{QUICKSTART} {sizes} {flags}"
    models = ["--actor_model_name_or_path", folder / "model", "--critic_model_name_or_path", folder / "reward"]
    places = ["--data_path", folder / "data/prompts.jsonl", "--output_dir", folder / f"out{dist.world_size()}"]
    costs = Costs()
    with measuring(costs):
        train_ppo(parse("ppo", [str(word) for word in (*models, *places, *words.split())]))
    if dist.is_main():
        layers = AutoConfig.from_pretrained(folder / "model").num_hidden_layers
        (folder / "costs.json").write_text(json.dumps(costs.results(layers)))
    dist.shutdown()
    leave(0)


def launch(folder: Path, ranks: int, flags: str) -> dict[str, Any]:
    """Run `work` on some ranks; what rank 0 found."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks)]
    command += ["--master_port", str(free_port()), __file__, "--work", str(folder), f"--flags={flags}"]
    top = Path(__file__).resolve().parent.parent
    env = {**os.environ, "PYTHONPATH": f"{top}:{top / 'benchmarks'}", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    subprocess.run(command, env=env, check=True, stdout=sys.stderr)
    return json.loads((folder / "costs.json").read_text())


def main() -> None:
    """Launch the ranks and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure")
    parser.add_argument("--flags", default="", help="more flags of step 3")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--before", type=Path, help="JSON of another version, to compare with")
    parser.add_argument("--docs", type=Path, help="write the comparison into this file")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # folder of a launched rank
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # given by the launcher
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.flags)
    with tempfile.TemporaryDirectory(prefix="step_costs_") as temporary:
        folder = Path(temporary)
        make_models(folder)
        found = {str(ranks): launch(folder, ranks, arguments.flags) for ranks in arguments.ranks}
    print(tables(found))
    if arguments.before:
        text = summary(found, json.loads(arguments.before.read_text()))
        print(f"\n{text}")
        if arguments.docs:
            write_docs(arguments.docs, text, MARKS)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
