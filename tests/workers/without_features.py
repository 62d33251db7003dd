"""Runs copies of the tree, each without some features, in processes that have imported the
libraries already.

without_features.py ASSETS   reads the path of a tree and names of tests from each line of its
    input, and answers with a line of JSON: the digest of what a default run of step 3 leaves, and
    the exit code and the last words of the loop's tests that pytest chooses by these names
"""

import hashlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import datasets  # noqa: F401
import deepspeed.module_inject.auto_ep_layer  # noqa: F401
import pytest
import torch.utils.tensorboard  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
from safetensors.torch import load_file

TESTS = ("test_loop", "test_update", "test_collect", "test_advantages", "test_mini_dataset")
OF_TIME = ("seconds", "time", "memory", "_per_second", "throughput", "tflops")


def in_child(work: Callable[[], int], output: Path) -> int:
    """Do this in a forked process, which writes into the file `output`; returns its exit code."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 1
        try:
            code = work()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:  # noqa: BLE001  the top level of a process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def enter(tree: Path) -> None:
    """Let imports come from the tree."""
    os.chdir(tree)
    sys.path[:] = [str(tree), str(tree / "tests"), *sys.path[1:]]


def default_run(tree: Path, assets: Path, output: Path) -> int:
    """Two PPO steps with the default algorithm."""
    enter(tree)
    flags = {
        "actor_model_name_or_path": assets / "lm",
        "critic_model_name_or_path": assets / "reward",
        "data_path": assets / "prompts.jsonl",
        "output_dir": output,
        "per_device_generation_batch_size": 4,
        "per_device_training_batch_size": 2,
        "max_prompt_seq_len": 32,
        "max_answer_seq_len": 6,
        "max_steps": 2,
        "dtype": "fp32",
        "data_split": "0,0,1",
    }
    words = []
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    script = str(tree / "training/step3_ppo/main.py")
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
    return 0


def loop_tests(tree: Path, chosen: str) -> int:
    """The tests of the loop and of what it is made of, those that `-k` chooses."""
    enter(tree)
    files = [f"tests/ppo/{name}.py" for name in TESTS]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", chosen, "-m", "not release"]
    return int(pytest.main([*options, *files]))


def digest(output: Path) -> str:
    """A hash of the metrics without times, and of the weights."""
    hashed = hashlib.sha256()
    for line in (output / "metrics.jsonl").read_text().splitlines():
        numbers = json.loads(line)
        kept = {name: numbers[name] for name in numbers if not any(w in name for w in OF_TIME)}
        hashed.update(json.dumps(kept, sort_keys=True).encode())
    for file in sorted(output.rglob("model*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            hashed.update(name.encode() + tensor.numpy().tobytes())
    return hashed.hexdigest()


def main() -> None:
    assets = Path(sys.argv[1])
    for line in sys.stdin:
        path, _, chosen = line.strip().partition(" ")
        tree = Path(path)
        with tempfile.TemporaryDirectory() as folder:
            said = Path(folder) / "said"
            output = Path(folder) / "output"
            code = in_child(lambda: default_run(tree, assets, output), said)  # noqa: B023
            result = {"tree": path, "digest": None, "tests": None}
            if code == 0:
                result["digest"] = digest(output)
                result["tests"] = in_child(lambda: loop_tests(tree, chosen), said)  # noqa: B023
            result["said"] = said.read_text()[-4000:]
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
