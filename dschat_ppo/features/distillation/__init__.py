"""Distillation: the actor learns from the distributions of teachers."""
