"""The planner: memory of a run from its flags and model configurations, before any weight is
read."""
