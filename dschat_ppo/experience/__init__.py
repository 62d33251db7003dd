"""Scoring a rollout, and caching the experience of several for the updates."""
