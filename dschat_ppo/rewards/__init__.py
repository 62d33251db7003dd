"""Reward sources: each scores the responses of a rollout, one number per response."""
