"""Columns of the records of step 3."""

WRITTEN = "judge_written"
COLUMNS = {WRITTEN: "row"}  # (B, K) uint8, the end of what each judge wrote, see `sample_remarks`
