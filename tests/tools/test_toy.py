"""The embedded conversation task: its rule, its data, its tokenizer."""

import json
import random
import subprocess
import sys

from transformers import AutoTokenizer

from dschat_ppo.tools import toy

MIA = toy.Question("Mia", "red", "lamp", 0)


def test_keeps_rule_on_hand_written_answers():
    assert toy.keeps_rule(MIA, "Hello Mia! The red lamp is in the attic. Have a lovely day!")
    assert not toy.keeps_rule(MIA, "Hello Ben! The red lamp is in the attic. Have a lovely day!")
    assert not toy.keeps_rule(MIA, "Hello Mia! The blue lamp is in the attic. Have a lovely day!")
    assert not toy.keeps_rule(MIA, "Hello Mia! The red lamp is in the attic. Stop asking.")
    assert not toy.keeps_rule(MIA, "I am busy. The red lamp is in the attic. Have a lovely day!")
    assert not toy.keeps_rule(MIA, "Hello Mia! The red lamp is in the attic. Stop asking. Have a lovely day!")
    assert not toy.keeps_rule(MIA, "Hello Mia! The red lamp is in the attic.")
    assert not toy.keeps_rule(MIA, "")


def test_held_out_questions_are_in_no_other_file():
    questions = toy.make_questions(random.Random(3))
    asked = {part: {(q.name, q.colour, q.thing) for q in found} for part, found in questions.items()}
    for part in ("heldout", "sft_eval", "pairs_eval"):
        assert len(asked[part]) == toy.COUNTS[part]
        for other in asked:
            assert other == part or not asked[part] & asked[other]


def test_the_true_rule_scores_a_held_out_row_without_torch():
    rng = random.Random(0)
    row = toy.make_rows(toy.make_questions(rng), rng)["heldout"][0]
    question = toy.Question(**row["about"])
    kind, curt = toy.kind_answer(question, rng), toy.curt_answer(question, rng)
    code = f"""import sys
from dschat_ppo.tools.toy import true_rule
about = {row["about"]!r}
print(true_rule({kind!r}, about, prompt="p"), true_rule({curt!r}, about), "torch" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "1.0 0.0 False\n"


def test_the_same_seed_makes_the_same_files(tmp_path):
    toy.make(tmp_path / "a", 5)
    toy.make(tmp_path / "b", 5)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) > 8
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_tokenizer_has_distinct_pad_and_eos_and_round_trips(tmp_path):
    toy.make(tmp_path, 5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    row = json.loads((tmp_path / "data/sft.jsonl").read_text().splitlines()[0])
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert text.endswith("<|end|>")
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert len(tokenizer) <= config["vocab_size"]
