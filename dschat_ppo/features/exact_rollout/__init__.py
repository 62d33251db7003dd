"""Rollouts whose log-probs are those of the training pass, to the last bit."""
