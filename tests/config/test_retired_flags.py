"""Flags that left: giving one is refused with what to use, and a configuration of an earlier version loads with a note.

The tests of files and checkpoints add a flag `gone` to the table, so that they do not depend on its rows.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command_lines import NEEDED, read

from dschat_ppo.checkpoint.identity import HARMLESS, differences
from dschat_ppo.config.cli import OUR_NAMES, STEPS, notes, parse
from dschat_ppo.config.flag_parser import FlagParser
from dschat_ppo.config.retired_flags import NOW_FIXED, RETIRED, note_on_retired
from dschat_ppo.config.step_config import defaults_of, flatten
from dschat_ppo.errors import UserError
from dschat_ppo.monitor.writers import write_config

ROOT = Path(__file__).parents[2]
PAGES = [path for pattern in ("*.md", "docs/**/*.md", "dschat_ppo/**/*.py", "training_scripts/**/*.sh")
         for path in ROOT.glob(pattern) if path.name not in ("CHANGELOG.md", "retired_flags.py")]  # fmt: skip
IGNORED = "flags that this version does not have are ignored: --gone"


@pytest.fixture
def gone(monkeypatch):
    monkeypatch.setitem(RETIRED, "gone", "left: use --seed")


def test_a_retired_flag_is_no_flag_of_today_and_no_answer_to_another():
    flags = set().union(*map(defaults_of, STEPS.values()))
    assert not flags & set(RETIRED)
    assert not HARMLESS & set(RETIRED) and set(NOW_FIXED) <= set(RETIRED)
    assert not set(RETIRED) & {ours for names in OUR_NAMES.values() for ours in names.split()}
    for answer in RETIRED.values():
        assert "\n" not in answer and set(re.findall(r"--(\w+)", answer)) <= flags, answer


def test_no_page_and_no_message_names_a_retired_flag():
    """But for the rows of the migration guides whose column "here" says "left"."""
    assert len(PAGES) > 100
    for page in PAGES:
        lines = [line for line in page.read_text(encoding="utf-8").splitlines() if "| left" not in line]
        named = re.findall(r"(?<![\w.-])--(?:no_)?(\w+)", "\n".join(lines))
        assert not set(named) & set(RETIRED), page


@pytest.mark.parametrize("word", ["--gone", "--gone=3", "--no_gone"])
def test_giving_a_retired_flag_is_refused_with_what_to_use(gone, word):
    for step in NEEDED:
        with pytest.raises(UserError, match=rf"^unknown flag .*\n  {word.split('=')[0]}: left: use --seed$"):
            read(step, word)
    with pytest.raises(UserError, match=r"\n  --gone: left: use --seed$"):  # a command of another program
        FlagParser(allow_abbrev=False).parse_args(["--gone", "3"])


def test_a_file_that_a_person_wrote_is_refused_with_what_to_use(gone, tmp_path):
    (tmp_path / "mine.yaml").write_text("gone: 3\nseed: 5\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"mine.yaml: unknown flag or value: --gone \(.*\n  --gone: left: use --seed$"):
        read("sft", "--config", str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("step", NEEDED)
def test_a_configuration_that_an_earlier_version_saved_loads_with_one_note(gone, tmp_path, step):
    former = parse(step, [*NEEDED[step], "--seed", "77"])
    path = write_config(flatten(former), tmp_path)
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({"gone": 3, **settings}), encoding="utf-8")
    config = parse(step, ["--config", str(path)])
    assert config == replace(former, run=replace(former.run, config=str(path)))
    assert notes(step, config) == [f"--config {path}: {IGNORED}"]
    path.write_text(yaml.safe_dump({"gonne": 3, **settings}), encoding="utf-8")  # a misspelt flag is still refused
    with pytest.raises(UserError, match="--gonne"):
        parse(step, ["--config", str(path)])


def test_a_checkpoint_of_an_earlier_version_is_compared_without_flags_that_left(gone, monkeypatch):
    now = flatten(parse("sft", NEEDED["sft"]))
    saved = json.loads(json.dumps({"gone": 3, **now}))
    assert differences(saved, now, {}) == {}
    monkeypatch.setitem(NOW_FIXED, "gone", 3)  # every run computes now what it did with 3
    assert differences(saved, now, {}) == {}
    assert differences({**saved, "gone": 4}, now, {}) == {"gone": "4 -> 3, always: this version has no such flag"}
    assert note_on_retired({"seed": 1, "gone": 3}) == IGNORED and note_on_retired({"seed": 1}) is None
    assert note_on_retired({"gone": 4}) == f"{IGNORED}; --gone 4 is now 3"
