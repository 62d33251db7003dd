"""The pages for users of other trainers: their tables agree with our parsers, and their commands
pass `--dry_run`."""

import json
import re
import shlex
import shutil

import pytest
from bash_blocks import ROOT, blocks_of
from command_lines import NEEDED
from config.deepspeed_chat_flags import DEEPSPEED_CHAT
from config.deepspeed_chat_scripts import GENERATION_BATCHES, REFUSED, SCRIPTS
from fixed_dtype import REAL_DEFAULT
from tables import Row, flags_in, names_in, rows_of

from dschat_ppo.commands import run_training
from dschat_ppo.config.cli import parse, unused_flag_notes
from dschat_ppo.config.other_trainers import flags_for
from dschat_ppo.config.step_config import flatten

CHAT = ROOT / "docs" / "from-deepspeed-chat.md"
FROM_TRL = ROOT / "docs" / "from-trl.md"
FROM_OPENRLHF = ROOT / "docs" / "from-openrlhf.md"
FROM_VERL = ROOT / "docs" / "from-verl.md"
FOLDERS = {"step1_sft": "sft", "step2_reward": "reward", "step2_dpo": "dpo", "step3_ppo": "ppo"}
COMMANDS = [
    (page.name, line)
    for page in (CHAT, FROM_TRL, FROM_OPENRLHF, FROM_VERL)
    for b in blocks_of(page)
    for line in b.commands
]
# heading of a table -> the step whose flags it names
STEPS = {
    "Options of all trainers": "sft",
    "SFTConfig": "sft",
    "RewardConfig": "reward",
    "DPOConfig": "dpo",
    "KTOConfig": "dpo",
    "GRPOConfig and RLOOConfig": "ppo",
    "PPOConfig": "ppo",
    "Options of all programs": "sft",
    "train_sft": "sft",
    "train_rm": "reward",
    "train_dpo": "dpo",
    "train_ppo_ray": "ppo",
    "Rewards": "ppo",
    "Data and length of the run": "ppo",
    "Algorithm": "ppo",
    "Models, optimizer and generation": "ppo",
}
TABLES = [
    row
    for page in (FROM_TRL, FROM_OPENRLHF, FROM_VERL)
    for row in rows_of(page)
    if row.heading in STEPS
]
NEEDED_OF = {**NEEDED, "dpo": NEEDED["reward"]}
REQUIRED = {
    step: {word[2:] for word in words if word.startswith("--")} - {"critic_model_name_or_path"}
    for step, words in NEEDED_OF.items()
}
DEFAULTS = {step: flatten(parse(step, words)) | REAL_DEFAULT for step, words in NEEDED_OF.items()}
# which `NEEDED` gives, although it may be omitted
DEFAULTS["ppo"]["critic_model_name_or_path"] = None
ALIASES = {
    "input_key": "prompt_column",
    "output_key": "response_column",
    "label_key": "answer_column",
    "chosen_key": "chosen_column",
    "rejected_key": "rejected_column",
}


def our_defaults(step: str, flags: list[str]) -> list[object]:
    """As the tables write them."""

    def shown(name: str) -> object:
        value = DEFAULTS[step][name]
        if value is None or value == []:
            return "none"
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    return ["required" if name in REQUIRED[step] else shown(name) for name in flags]


def as_number(text: object) -> object:
    try:
        return float(str(text))
    except ValueError:
        return str(text).strip("`")


def test_a_row_names_flags_of_the_step_with_their_defaults():
    assert len(TABLES) > 250
    for row in TABLES:
        step, flags = STEPS[row.heading], flags_in(row.cells["here"])
        assert set(flags) <= set(DEFAULTS[step]), f"{row}: no flag of {step}"
        written = [
            as_number(text.strip()) for text in row.cells["default here"].split(", ") if text
        ]
        assert written == [as_number(value) for value in our_defaults(step, flags)], row


@pytest.mark.parametrize(
    "page", [CHAT, FROM_TRL, FROM_OPENRLHF, FROM_VERL], ids=lambda page: page.name
)
def test_every_flag_in_notes_exists(page):
    known = set().union(*DEFAULTS.values(), ALIASES)
    known |= {f"no_{name}" for name in known} | {"model", "pairs", "num_accelerators"}
    for row in rows_of(page):
        for column, cell in row.cells.items():
            if column not in (
                "OpenRLHF",
                "before",
                "DeepSpeed-Chat",
                "DeepSpeed-VisualChat",
                "verl",
            ):
                assert set(flags_in(cell)) <= known, cell


def test_a_name_of_theirs_that_is_answered_is_answered_with_a_flag_of_the_row():
    for row in (row for row in TABLES if row.cells["here"] != "none"):
        step, ours = STEPS[row.heading], flags_in(row.cells["here"])
        columns = [row.cells.get(name, "") for name in ("TRL", "OpenRLHF", "before")]
        for theirs in names_in(" ".join(columns)):
            if theirs not in DEFAULTS[step] and theirs not in ("bf16", "fp16"):
                answered = {
                    ALIASES.get(name, name)
                    for name in flags_for(theirs, [*DEFAULTS[step], *ALIASES])
                }
                assert not answered or answered & set(ours), f"--{theirs} -> {answered}"


def chat_flags() -> dict[tuple[str, str], Row]:
    """(step, flag) of DeepSpeed-Chat -> the row that lists it."""
    found = {}
    for row in rows_of(CHAT):
        for step in re.findall(r"DPO|[123]", row.cells.get("steps", "")):
            for name in names_in(row.cells["flag"]):
                assert (step, name) not in found, f"--{name} of step {step} is listed twice"
                found[step, name] = row
    return found


DPO_ALONE = ("beta", "label_smoothing", "offload_reference_model", "print_loss")
REWARD_ALONE = ("num_padding_at_beginning", "eval_interval", "eval_iters")
CHAT_FLAGS = {
    "1": dict(DEEPSPEED_CHAT["sft"]),
    "2": {name: entry for name, entry in DEEPSPEED_CHAT["reward"].items() if name not in DPO_ALONE},
    "DPO": {
        name: entry for name, entry in DEEPSPEED_CHAT["reward"].items() if name not in REWARD_ALONE
    },
    "3": dict(DEEPSPEED_CHAT["ppo"]),
}
CHAT_FLAGS["DPO"]["learning_rate"] = (1e-3, ["9.65e-6"])
PARSERS = {"1": "sft", "2": "reward", "DPO": "dpo", "3": "ppo"}
TOGETHER = {  # what makes a flag act
    "align_overflow": ["--dtype", "fp16"],
    "tp_gather_partition_size": ["--inference_tp_size", "2"],
    **{
        f"{role}lora_{name}": [f"--{role}lora_dim", "8"]
        for role in ("", "actor_", "critic_")
        for name in ("learning_rate", "module_name")
    },
}
NEVER_EQUAL = {"data_path", "output_dir"}  # required here


def test_the_page_lists_every_flag_of_deepspeed_chat_once():
    # and two of DeepSpeed
    assert [len(CHAT_FLAGS[step]) for step in CHAT_FLAGS] == [32 + 2, 32 + 2, 33 + 2, 60 + 2]
    frozen = {(step, name) for step, flags in CHAT_FLAGS.items() for name in flags}
    assert set(chat_flags()) == frozen


@pytest.mark.parametrize("step", PARSERS)
def test_a_flag_of_deepspeed_chat_does_what_its_table_says(step):
    parser = PARSERS[step]
    for name, table in (
        (name, row.heading) for (its, name), row in chat_flags().items() if its == step
    ):
        default, words = CHAT_FLAGS[step][name]
        config = parse(parser, [*NEEDED_OF[parser], f"--{name}", *words, *TOGETHER.get(name, [])])
        printed = [
            line
            for line in unused_flag_notes(parser, config)
            if line.startswith(f"--{name} has no effect")
        ]
        assert bool(printed) is (table == "Flags without effect"), name
        ours = {"beta": 0.1}.get(name, DEFAULTS[parser][name])
        differs = name in NEVER_EQUAL or (ours != default and default != "required")
        assert (
            differs is (table == "Flags with another default") or table == "Flags without effect"
        ), name


def test_the_page_lists_the_training_scripts_with_what_they_need():
    need, scripts = (
        {},
        {row.cells["here"]: row for row in rows_of(CHAT) if row.heading == "Training scripts"},
    )
    assert {"run", "add `--data_path Dahoas/rm-static`", "add `--generation_batches 16`"} < set(
        scripts
    )
    for row in rows_of(CHAT):
        if row.heading == "Training scripts":
            folder = {"1": "step1", "2": "step2", "DPO": "dpo", "3": "step3"}[row.cells["step"]]
            need |= {
                f"{folder}/{name}": row.cells["here"] for name in names_in(row.cells["scripts"])
            }
    assert set(need) == set(SCRIPTS)
    for name, said in need.items():
        if not SCRIPTS[name].data:
            assert said.startswith("add `--data_path Dahoas/rm-static`")
            said = (
                said.replace("`--data_path Dahoas/rm-static` and ", "")
                if " and " in said
                else "run"
            )
        if name in GENERATION_BATCHES:
            assert said == f"add `--generation_batches {GENERATION_BATCHES[name]}`"
        elif name in REFUSED:
            assert said == "add `--dtype fp16`; needs a GPU"
            assert "--dtype fp16" in REFUSED[name][0]
        else:
            assert said == "run"


@pytest.fixture(scope="module")
def folder(assets, tmp_path_factory):
    """Where the commands run: models with long positions (no weights), pairs, and a reward
    function."""
    folder = tmp_path_factory.mktemp("migration")
    for name, source in (
        ("MODEL", "lm"),
        ("ACTOR", "lm"),
        ("REWARD", "reward"),
        ("CRITIC", "reward"),
    ):
        shutil.copytree(
            assets / source, folder / name, ignore=shutil.ignore_patterns("*.safetensors")
        )
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": 4096})
        )
    (folder / "DATA").mkdir()
    pairs = (assets / "pairs.jsonl").read_text().splitlines()
    rows = [
        {**json.loads(line), "prompt": f"{json.loads(line)['prompt']} {n}"}
        for n in range(8)
        for line in pairs
    ]
    (folder / "DATA/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text("def score(response):\n    return len(response)\n")
    return folder


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(COMMANDS)]
)
def test_a_command_passes_a_dry_run(folder, capsys, monkeypatch, page, command):
    launcher, script, *words = shlex.split(command)
    assert (launcher, (ROOT / script).exists()) == ("deepspeed", True)
    monkeypatch.chdir(folder)
    code = run_training(FOLDERS[script.split("/")[1]], [*words, "--dry_run"])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    assert "dry run for 1 rank: flags, models and data are valid" in said.out
