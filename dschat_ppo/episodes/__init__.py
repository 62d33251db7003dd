"""Episodes: answers in several turns, with tools and environments."""
