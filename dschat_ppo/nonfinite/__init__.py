"""NaN and infinity: detection, policy, and bundles that reproduce the failure."""
