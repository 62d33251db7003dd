"""Generation: from prompts to sampled responses with their masks and log-probs."""
