"""The upload of a trained model to the Hugging Face hub, at the end of its run."""
