"""Save the state of a run, and resume from it."""
