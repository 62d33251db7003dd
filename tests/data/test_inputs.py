"""Small files in the shapes that people have (`inputs/`): what each step reads in them, and what it trains."""

from pathlib import Path

import pytest
from form_fixtures import assistant, read, user
from transformers import AutoTokenizer

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.collators import collate_sft
from dschat_ppo.data.messages import WEIGHT
from dschat_ppo.data.prepare import prepare
from dschat_ppo.data.sample_text import row_sample
from dschat_ppo.errors import UserError

INPUTS = Path(__file__).parent / "inputs"
ASK = user("Where is the lamp?")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["turn_weight", "turn_loss_mask", "turn_train_false"])
def test_a_turn_that_its_owner_excluded_is_context_and_no_target(name, streaming, assets, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "lm")
    given = {"streaming": True, "streaming_rows": 4} if streaming else {}
    flags = DataFlags([str(INPUTS / f"{name}.jsonl")], data_split="1,0,0", data_output_path=str(tmp_path), **given)
    rows = prepare("sft", tokenizer, flags, 400, all_turns=True).train
    for number in range(2):
        batch = collate_sft(rows, [number], 0, train_on_prompt=False)
        assert "WRONG DRAFT" in tokenizer.decode(batch.input_ids[0])
        trained = tokenizer.decode(batch.input_ids[0][batch.loss_mask[0]])
        assert "WRONG" not in trained and "DRAFT" not in trained and trained.startswith("In the ")
        assert "⟦In the " in row_sample(tokenizer, rows[number]) and "⟦WRONG" not in row_sample(tokenizer, rows[number])


def test_a_conversation_ends_with_its_last_trained_turn():
    kept = [ASK, assistant("In the hall."), user("Sure?"), assistant("No.", train=False)]
    for use, answers in (("sft", ["In the hall."]), ("prompt", [])):
        (found,) = read([{"messages": kept}], use)
        assert (found.prompt, list(found.answers)) == ([ASK], answers)
    with pytest.raises(UserError, match="row 1: the answer of 'messages' is excluded from training"):
        read([{"messages": [ASK, assistant("No.", loss=0)]}], "sft")
    with pytest.raises(UserError, match="message 2 of 'messages' has the weight 0.5; .* trained .* or not"):
        read([{"messages": [ASK, assistant("No.", weight=0.5)]}], "sft")
    found = read([{"messages": [ASK, assistant("Yes.", weight=1), user("b"), assistant("c", weight="1.0")]}], "sft")
    assert WEIGHT not in str(found)
