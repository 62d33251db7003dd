"""Command lines for tests of the configuration."""

from dschat_ppo.config.cli import parse, unused_flag_notes
from dschat_ppo.config.step_config import flatten

# step -> the required flags
NEEDED = {
    "sft": ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"],
    "reward": ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"],
    "ppo": (
        (
            "--actor_model_name_or_path a "
            "--critic_model_name_or_path c --data_path d --output_dir o"
        ).split()
    ),
}


def config_of(step: str, *words: str):
    """The configuration, with the required flags and `words` on the command line."""
    return parse(step, [*NEEDED["reward" if step == "dpo" else step], *words])


def read(step: str, *words: str) -> dict:
    """Flag name -> value, of `config_of`."""
    return flatten(config_of(step, *words))


def noted(step: str, *words: str) -> list[str]:
    """The notes about flags without effect, of `config_of`."""
    return unused_flag_notes(step, config_of(step, *words))
