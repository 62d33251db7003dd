"""Command lines for tests of the configuration."""

from dschat_ppo.config.cli import flatten, parse

# step -> the required flags
NEEDED = {
    "sft": ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"],
    "reward": ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"],
    "ppo": "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o".split(),
}


def read(step: str, *words: str) -> dict:
    """Flag name -> value, with the required flags and `words` on the command line."""
    return flatten(parse(step, [*NEEDED[step], *words]))
