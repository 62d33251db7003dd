"""Folders next to the checkpoints."""

JOURNAL = "agents"
FOLDERS = (JOURNAL,)
