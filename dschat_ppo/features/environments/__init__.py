"""Environments: responses of several turns, which act in them."""
