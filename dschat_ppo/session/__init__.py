"""One run and its output folder: start, lock, resume, train. Skip it at first reading."""
