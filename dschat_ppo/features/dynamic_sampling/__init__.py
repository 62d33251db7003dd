"""Dynamic sampling (Yu et al. 2025, DAPO): prompts whose responses all score alike are replaced by
others, in further rounds of a PPO step."""
