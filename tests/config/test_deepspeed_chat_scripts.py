"""The flag lists of DeepSpeed-Chat's training scripts parse."""

import pytest
from config.deepspeed_chat_scripts import GENERATION_BATCHES, REFUSED, SCRIPTS

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError


def words_of(name: str) -> list[str]:
    """With the data set that DeepSpeed-Chat downloads where a script names none."""
    script = SCRIPTS[name]
    return script.words if script.data else ["--data_path", "Dahoas/rm-static", *script.words]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in REFUSED])
def test_a_script_parses(name):
    parse(SCRIPTS[name].step, words_of(name))


def test_the_message_names_the_data_set_that_scripts_leave_to_a_default():
    for name in (name for name, script in SCRIPTS.items() if not script.data):
        with pytest.raises(UserError, match=r"--data_path \(DeepSpeed-Chat's default: Dahoas/rm-static\)"):
            parse(SCRIPTS[name].step, SCRIPTS[name].words)


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_is_refused_by_one_reason(name):
    words, (reason, flag) = words_of(name), REFUSED[name]
    with pytest.raises(UserError, match=reason):
        parse("ppo", words)
    place = words.index(flag)
    after = place + 1 if words[place + 1].startswith("--") else place + 2
    parse("ppo", words[:place] + words[after:])


@pytest.mark.parametrize("name", [name for name, s in SCRIPTS.items() if s.step == "ppo" and name not in REFUSED])
def test_the_batch_sizes_of_step_3_fit_or_the_message_says_what_does(name):
    words, batches = words_of(name), GENERATION_BATCHES.get(name)
    if batches is not None:
        with pytest.raises(
            UserError, match=f"not a whole number of optimizer steps.* Set --generation_batches {batches}$"
        ):
            plan_ppo(parse("ppo", words).ppo, 10_000, 1)
        words = [*words, "--generation_batches", str(batches)]
    assert plan_ppo(parse("ppo", words).ppo, 10_000, 1).ppo_steps > 0
