"""Flags, YAML defaults and the arithmetic of batches. Needs no torch."""
