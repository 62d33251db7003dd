"""Judges: frozen language models of the run that score responses."""
