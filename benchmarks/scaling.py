"""How a PPO step scales: bytes between ranks and CPU seconds, predicted and measured.

    python benchmarks/scaling.py [--ranks 1 2 4] [--parts bytes time] [--only RUN ...] [--json FILE]
        [--docs docs/scaling.md]

The real step 3 runs on random Llamas of two sizes, all four models of one size, in bf16 with ZeRO-3 that gathers layer
by layer, as it does for large models. Answers have a fixed length. In one PPO step the bytes of every collective of
rank 0 are counted, by phase. The CPU seconds of the process are those of the fastest of three other steps, without
counters and with one thread. "bytes" runs both sizes on each number of ranks, and one of them with two updates per PPO
step. "time" runs one rank with more prompts, longer answers and larger models. With `--json` FILE, results are added to
those in the file, and the tables show all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import scaling_model
import torch
from measure import write_docs
from op_counts import Operators
from scaling_tables import MARKS, tables
from torch import Tensor, nn
from trajectories import free_port
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from dschat_ppo.common import dist
from dschat_ppo.common.phases import current_phase
from dschat_ppo.config.cli import parse
from dschat_ppo.engine import ds_config
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.ppo.report import PPOReport
from dschat_ppo.run.launch import leave
from dschat_ppo.tools import toy
from dschat_ppo.tools.toy_model import untrained_llama

SIZES = {"small": (4, 128), "large": (8, 256)}  # layers, hidden
HEAD_SIZE = 32
COUNTED, PLAIN = 3, (4, 5, 6)  # PPO steps; the ones before warm up
# DeepSpeed keeps weights between two uses that are close. Here it keeps none, as of the layers of a large model.
LAYERWISE = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
WEIGHT_BYTES = 2


@dataclass(frozen=True)
class Run:
    """One run of step 3; answers and prompts of one rank."""

    size: str
    ranks: int = 1
    rows: int = 16
    answer: int = 32
    updates: int = 1

    @property
    def flags(self) -> str:
        """Flags of step 3 besides paths."""
        return (
            "--data_split 0,0,1 --dtype bf16 --actor_zero_stage 3 --critic_zero_stage 3 --num_warmup_steps 0 "
            f"--max_prompt_seq_len 32 --max_answer_seq_len {self.answer} --min_answer_seq_len {self.answer} "
            f"--per_device_generation_batch_size {self.rows} "
            f"--per_device_training_batch_size {self.rows // self.updates} --max_steps {PLAIN[-1]} --save_minutes 0"
        )


def bytes_runs(ranks: list[int]) -> dict[str, Run]:
    """Runs whose bytes are counted."""
    runs = {f"{size}, {number} rank(s)": Run(size, number) for size in SIZES for number in ranks}
    return runs | {f"small, {number} ranks, two updates": Run("small", number, updates=2) for number in ranks[1:2]}


TIME_RUNS = {
    "base": Run("small"),
    "prompts x 2": Run("small", rows=32),
    "prompts x 4": Run("small", rows=64),
    "answers x 2": Run("small", answer=64),
    "answers x 4": Run("small", answer=128),
    "larger models": Run("large"),
}


class Counts:
    """What rank 0 sees of a run."""

    def __init__(self) -> None:
        self.payload: Counter[tuple[str, str]] = Counter()  # (phase, kind) -> bytes of the whole tensors
        self.is_counting = False
        self.passes: Counter[str] = Counter()  # "PHASE ROLE" -> forward passes of a model
        self.seconds: list[float] = []  # CPU seconds of each of `PLAIN`
        self.began = 0.0
        self.prompt = 0.0  # mean tokens of a prompt in the counted step

    def see(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Count an operator if it is a collective that moves a tensor."""
        kind = kind_of(name)
        if kind is not None:
            tensors = whole_tensors(kind, arguments)
            if not all(tensor.dtype == torch.bfloat16 for tensor in tensors):  # no weights, no gradients
                kind = "other"
            self.payload[current_phase(), kind] += sum(tensor.nbytes for tensor in tensors)

    def count_passes(self, engines: RLHFEngine) -> None:
        """Count the forward passes of each model from now on; the run ends with this process."""
        for role in ("actor", "critic", "reference", "reward"):
            module = getattr(engines, role).module

            def seen(*_: Any, role: str = role) -> None:
                self.passes[f"{current_phase()} {role}"] += self.is_counting

            module.register_forward_pre_hook(seen)


def kind_of(name: str) -> str | None:
    """The kind of a collective by the name of its operator, such as "c10d::_allgather_base_"; None for others."""
    if not name.startswith("c10d::"):
        return None
    kinds = ("allgather", "reduce_scatter", "allreduce", "broadcast")
    return next((kind for kind in kinds if kind in name), None)


def whole_tensors(kind: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The whole tensors of a collective: what is gathered, or what is reduced before it is scattered."""
    return list(_tensors(arguments[1 if kind == "reduce_scatter" else 0]))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


@contextmanager
def measuring(counts: Counts) -> Iterator[None]:
    """Count the PPO step `COUNTED` of a run in the block, and time `PLAIN`; a step ends where its report does."""
    finish, operators = PPOReport.finish, Operators(counts.see)

    def finished(self: PPOReport, step: int) -> None:
        if step == COUNTED and self.ppo.state.experience is not None:
            counts.prompt = float(self.ppo.state.experience.prompt_mask.sum(dim=1).float().mean())
        finish(self, step)
        if step == COUNTED - 1:
            counts.count_passes(self.ppo.engines)
            counts.is_counting = True
            operators.__enter__()
        if step == COUNTED:
            operators.__exit__(None, None, None)
            counts.is_counting = False
        if step in PLAIN:
            counts.seconds.append(time.process_time() - counts.began)
        counts.began = time.process_time()

    PPOReport.finish = finished  # type: ignore[method-assign]
    try:
        yield
    finally:
        PPOReport.finish = finish  # type: ignore[method-assign]


def shape_of(folder: Path) -> scaling_model.Shape:
    """The shape of a saved Llama."""
    config = AutoConfig.from_pretrained(folder)
    return scaling_model.Shape(
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim, config.vocab_size, config.tie_word_embeddings,
    )  # fmt: skip


def padded_bytes(model: nn.Module, ranks: int) -> int:
    """Bytes of the whole bf16 weights, each padded to a multiple of the ranks as ZeRO-3 does."""
    return sum(-(-weight.numel() // ranks) * ranks for weight in model.parameters()) * WEIGHT_BYTES


def weights_of(folder: Path, ranks: int) -> scaling_model.Bytes:
    """The weights of the four models."""
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
        scalar = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder / "reward"))
    policy_bytes, scalar_bytes = padded_bytes(policy, ranks), padded_bytes(scalar, ranks)
    return scaling_model.Bytes(policy_bytes, scalar_bytes, policy_bytes, scalar_bytes)


def make_models(folder: Path, size: str) -> None:
    """The data of the quickstart, a language model and a reward model of this size."""
    if (folder / "reward").exists():
        return
    toy.make(folder, 1234)
    layers, hidden = SIZES[size]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    untrained_llama(
        tokenizer, 1234, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE, num_key_value_heads=hidden // HEAD_SIZE // 2, head_dim=HEAD_SIZE,
        max_position_embeddings=256,
    ).save_pretrained(folder / "model")  # fmt: skip
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")


def work(folder: Path, run: Run) -> None:
    """The run of one rank. Rank 0 writes `found.json`."""
    from dschat_ppo.ppo.train_ppo import train_ppo

    ds_config.PERSISTENT_ELEMENTS = 0  # nor small weights, of any model
    settings = folder / "layerwise.json"
    models = ["--actor_model_name_or_path", folder / "model", "--critic_model_name_or_path", folder / "reward"]
    places = ["--data_path", folder / "data/prompts.jsonl", "--output_dir", folder / "out", "--overwrite_output_dir"]
    words = [*models, *places, "--deepspeed_config", settings, *run.flags.split()]
    counts = Counts()
    with measuring(counts):
        train_ppo(parse("ppo", [str(word) for word in words]))
    if dist.is_main():
        found = {
            "run": asdict(run), "prompt": counts.prompt, "seconds": min(counts.seconds),
            "shape": asdict(shape_of(folder / "model")), "weights": asdict(weights_of(folder, run.ranks)),
            "measured": {f"{phase} {kind}": number for (phase, kind), number in sorted(counts.payload.items())},
            "passes": dict(counts.passes),
        }  # fmt: skip
        (folder / "found.json").write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


def prepare(folder: Path, run: Run) -> None:
    """Write what the ranks of a run read."""
    make_models(folder, run.size)
    (folder / "layerwise.json").write_text(json.dumps({"zero_optimization": LAYERWISE}))


def launch(folder: Path, run: Run) -> dict[str, Any]:
    """Run `work` on its ranks; what rank 0 found."""
    prepare(folder, run)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(run.ranks)]
    command += ["--master_port", str(free_port()), __file__, "--work", str(folder), "--run", json.dumps(asdict(run))]
    top = Path(__file__).resolve().parent.parent
    env = {**os.environ, "PYTHONPATH": f"{top}:{top / 'benchmarks'}", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    subprocess.run(command, env=env, check=True, stdout=sys.stderr)
    return dict(json.loads((folder / "found.json").read_text()))


def main() -> None:
    """Launch the runs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks whose bytes count")
    parser.add_argument("--parts", nargs="+", choices=("bytes", "time"), default=["bytes", "time"], help="what to run")
    parser.add_argument(
        "--only", nargs="*", metavar="RUN", help="of these, the runs of these names; none: tables alone"
    )
    parser.add_argument("--json", type=Path, help="also add the numbers to this file")
    parser.add_argument("--docs", type=Path, help="write the tables into this file")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # folder of a launched rank
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)  # of a launched rank
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # given by the launcher
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, Run(**arguments.run))
    of_bytes = bytes_runs(arguments.ranks)
    order = [*of_bytes, *TIME_RUNS]
    runs = {**(of_bytes if "bytes" in arguments.parts else {}), **(TIME_RUNS if "time" in arguments.parts else {})}
    if arguments.only is not None:
        if unknown := set(arguments.only) - set(runs):
            parser.error(f"--only: no run {', '.join(map(repr, sorted(unknown)))}; there are {', '.join(runs)}")
        runs = {name: runs[name] for name in arguments.only}
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="scaling_") as temporary:
        for name, run in runs.items():
            print(f"--- {name}", file=sys.stderr, flush=True)
            found[name] = launch(Path(temporary) / run.size, run)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    text = tables({name: found[name] for name in sorted(found, key=[*order, *found].index)})
    print(text)
    if arguments.docs:
        write_docs(arguments.docs, text, MARKS)


if __name__ == "__main__":
    main()
