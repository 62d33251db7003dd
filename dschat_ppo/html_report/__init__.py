"""The report of runs: one self-contained HTML page, from the files that runs write. Imports no
large library."""
