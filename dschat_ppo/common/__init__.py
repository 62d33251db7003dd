"""Ranks, collectives, seeds, log lines, phases: for every layer above."""
