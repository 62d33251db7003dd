"""Columns of the records of step 3."""

JUDGE_TEXTS = "judge_texts"
COLUMNS = {JUDGE_TEXTS: "row"}  # (B, K) uint8, see `sample_remarks`
