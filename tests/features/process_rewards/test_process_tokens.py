"""The token ids and labels of every form with labelled steps, as they were recorded; see
`tests/data/test_token_record.py`."""

import json
from pathlib import Path

import pytest
from form_fixtures import ASK
from recorded_tokens import TEMPLATES, tokens_of
from step_rows import PRM800K, SHEPHERD, STEPS

RECORD = Path(__file__).with_name("step_token_record.json")
USES = {
    "steps": ("steps", False, 48, "left", "\n"),
    "ppo": ("prompt", False, 1000, "left"),
    "ppocut": ("prompt", False, 20, "right"),
}
CASES = {
    "stepwise": STEPS,
    "stepwise as messages": {**STEPS, "prompt": [ASK]},
    "PRM800K": PRM800K,
    "Math-Shepherd": SHEPHERD,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tokens_of_every_form_are_those_of_the_record(template):
    found = {case: tokens_of([row], {}, template, USES) for case, row in CASES.items()}
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["tokens"][template]
    assert {case: hashes for case, hashes in found.items() if hashes} == recorded
