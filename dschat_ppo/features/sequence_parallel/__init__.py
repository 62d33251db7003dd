"""Ulysses sequence parallelism: neighbouring ranks divide each sequence among them."""
