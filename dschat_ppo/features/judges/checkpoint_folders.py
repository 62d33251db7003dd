"""Folders next to the checkpoints of a run, which go with them."""

JOURNAL = "judge"  # what judges at an address said
FOLDERS = (JOURNAL,)
