"""DeepSpeed: configurations, the engines of the four roles, and the actor's switch between training and generation."""
