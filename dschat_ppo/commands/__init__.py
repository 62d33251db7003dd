"""The commands: a training step from its command line, and the start of its ranks."""
