"""Muon: an optimizer of matrices, in all steps."""
