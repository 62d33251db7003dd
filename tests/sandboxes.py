"""The sandbox as it is on this machine, and as on one without bubblewrap."""

import pytest

from dschat_ppo.rewards.sandbox import Isolation, isolation

FOUND = isolation()
WEAK = Isolation(bwrap=False, has_proc=False, leaves_root=FOUND.leaves_root)
needs_bwrap = pytest.mark.skipif(not FOUND.bwrap, reason=FOUND.missing.partition(", so")[0])
needs_proc = pytest.mark.skipif(not FOUND.has_proc, reason="no /proc of its own: bubblewrap or this container")
everywhere = pytest.mark.parametrize("how", [pytest.param(FOUND, id="bwrap", marks=needs_bwrap),
                                             pytest.param(WEAK, id="weak")])  # fmt: skip
