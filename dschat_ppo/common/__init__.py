"""Ranks, collectives, seeds, log lines, phases: what every layer above may use."""
