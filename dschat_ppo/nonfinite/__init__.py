"""NaN and infinity: which numbers are not finite, whether the run stops or skips, and bundles that reproduce it."""
