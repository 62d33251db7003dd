"""Moving averages: of the actor's weights, and of the actor as the reference."""
