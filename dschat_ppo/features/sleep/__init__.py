"""Sleep: what a rollout does not use waits in host memory."""
