"""Folders next to the checkpoints of a run, which go with them."""

JOURNAL = "environment"  # what environments answered since the oldest checkpoint
FOLDERS = (JOURNAL,)
