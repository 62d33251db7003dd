"""Prompts with images: read from the data, run by the vision tower of the model, which does not
train, and given to its decoder, which does."""
