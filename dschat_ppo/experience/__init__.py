"""Scoring a rollout, shaping it into experience, and serving that to the updates."""
