"""Settings of the sampling: from flags, from a chat's commands and from requests, with one set of limits."""

import argparse
from dataclasses import fields

import pytest

from dschat_ppo.errors import UserError
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.tools.sampling_settings import RANGES, SamplingSettings, add_sampling_flags, settings_of


def parsed(*words: str) -> SamplingSettings:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    return settings_of(parser.parse_args(words))


def test_each_setting_is_a_flag_with_a_range():
    assert [field.name for field in fields(SamplingSettings)] == list(RANGES)
    assert parsed() == SamplingSettings()
    words = "--temperature .5 --top_p .9 --top_k 3 --min_p .1 --repetition_penalty 1.2 --max_tokens 7 --seed 9".split()
    assert parsed(*words) == SamplingSettings(0.5, 0.9, 3, 0.1, 1.2, 7, 9)
    assert parsed(*words).sampling == SamplingParameters(0.5, 0.9, 3, 0.1, 1.2)


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", 0), ("temperature", "nan"), ("temperature", "x"), ("top_p", 1.1), ("top_p", 0), ("top_k", -1),
    ("top_k", "2.5"), ("top_k", True), ("min_p", None), ("max_tokens", 0), ("seed", 2**53), ("seed", ""),
    ("top_k", float("inf")),
])  # fmt: skip
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(UserError, match=f"^--{name} must be an? "):
        SamplingSettings().with_values({name: value}, "--")
