"""DeepSpeed: configurations, engines of the four models, one optimizer step, and the actor's switch
to generation."""
