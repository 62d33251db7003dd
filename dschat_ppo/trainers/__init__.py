"""The three steps, each readable from top to bottom."""
