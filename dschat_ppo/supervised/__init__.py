"""Steps 1 and 2: supervised training on answers and on pairs of answers."""
