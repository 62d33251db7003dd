"""Steps 1 and 2: supervised fine-tuning on answers, and training on pairs of answers."""
