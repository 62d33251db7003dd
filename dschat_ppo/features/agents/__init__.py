"""Programs that call the model through an OpenAI-compatible endpoint, as episodes of a rollout."""
