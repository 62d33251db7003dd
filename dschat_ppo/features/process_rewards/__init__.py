"""Process reward models: rows with a label for each step of an answer, the objective of step 2 that
learns them, and in step 3 one score from those of the steps of a response."""
