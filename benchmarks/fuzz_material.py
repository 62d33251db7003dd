"""The valid files that `fuzz.py` mutates: tiny models, an adapter, data in every form, and a finished run."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = {
    "sft": "training/step1_sft/main.py", "reward": "training/step2_reward/main.py",
    "dpo": "training/step2_dpo/main.py", "ppo": "training/step3_ppo/main.py",
}  # fmt: skip
SHAPE = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip
_ROWS = 12


def make_material(folder: Path) -> None:
    """Write everything into an empty folder, and train two optimizer steps there (`run`)."""
    _make_models(folder)
    _make_data(folder / "data")
    (folder / "deepspeed.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "steps_per_print": 100}))


def step_words(material: Path, step: str, output: Path) -> list[str]:
    """The flags of a step that has two optimizer steps."""
    words = ["--output_dir", str(output), "--dtype", "fp32", "--data_output_path", f"{output}_data"]
    if step == "ppo":
        words += ["--actor_model_name_or_path", str(material / "model")]
        words += ["--critic_model_name_or_path", str(material / "reward")]
        words += ["--data_path", str(material / "data/prompts.jsonl"), "--data_split", "0,0,1"]
        return [*words, "--max_prompt_seq_len", "32", "--max_answer_seq_len", "4", "--max_steps", "2"]
    data = "answers" if step == "sft" else "pairs"
    words += ["--model_name_or_path", str(material / "model"), "--data_path", str(material / f"data/{data}.jsonl")]
    words += ["--data_split", "1,0,0" if step == "sft" else "0,1,0", "--max_seq_len", "64", "--max_steps", "2"]
    return [*words, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1"]


def _make_models(folder: Path) -> None:
    from models import save_tiny_models
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, LlamaForCausalLM

    from dschat_ppo.tools.toy import CHAT_TEMPLATE

    save_tiny_models(folder, ("model", "reward"), CHAT_TEMPLATE, **SHAPE)
    base, config = LlamaForCausalLM.from_pretrained(folder / "model"), LoraConfig(r=2, target_modules="all-linear")
    get_peft_model(base, config).save_pretrained(folder / "adapter")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "adapter")


def _make_data(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    words = [f"word {number} of {number * 7 % 40}" for number in range(_ROWS)]
    rows = {
        "answers": [{"prompt": text, "response": f" it is {text}"} for text in words],
        "pairs": [{"prompt": text, "chosen": f" yes, {text}", "rejected": " no"} for text in words],
        "prompts": [{"prompt": text, "answer": str(number)} for number, text in enumerate(words)],
        "chats": [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]} for text in words
        ],
    }
    for name, content in rows.items():
        lines = [json.dumps(row) for row in content]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        (folder / f"{name}.json").write_text(json.dumps(content))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), folder / f"{name}.parquet")
    table = "".join(f'"{row["prompt"]}","{row["response"]}"\n' for row in rows["answers"])
    (folder / "answers.csv").write_text(f"prompt,response\n{table}")
    (folder / "texts.txt").write_text("\n".join(words) + "\n")


def note(text: str) -> None:
    """Add a line to `case.txt` in the working directory: what this case does."""
    with Path("case.txt").open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{text}\n")


def run_script(script: str, words: list[str]) -> None:
    """Run a step as the command line does; it ends the process."""
    sys.argv = [str(ROOT / script), *words]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def train_run(material: Path) -> None:
    """Run step 1 into `material/run`; ends the process with its exit code."""
    run_script(
        SCRIPTS["sft"], [*step_words(material, "sft", material / "run"), "--save_steps", "1", "--keep_final_checkpoint"]
    )
