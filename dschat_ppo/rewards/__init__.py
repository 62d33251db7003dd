"""Sources of reward. Each turns a rollout into one score per row."""
