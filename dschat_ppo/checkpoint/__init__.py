"""Saving the state of a run, and going on from it."""
