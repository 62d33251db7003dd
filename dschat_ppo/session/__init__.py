"""One run and its output folder. Skip it at first reading."""
