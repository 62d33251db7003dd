"""Command-line flags, YAML files and the batch plan. Imports no torch."""
