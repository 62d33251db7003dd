"""A process group of one rank inside the test process, for tests that build real DeepSpeed engines.

`from one_rank import one_rank  # noqa: F401`, then `pytestmark =
pytest.mark.usefixtures("one_rank")`.
"""

import gc

import pytest
import torch
import torch.distributed as torch_dist


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Join a group of one; at the end leave it and reset what DeepSpeed remembers of it."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    store = tmp_path_factory.mktemp("group") / "store"
    remembered = {module: dict(vars(module)) for module in (comm, groups)}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch_dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # DeepSpeed asks for it
        patch.setattr("deepspeed.ops.__compatible_ops__", {})  # as in a run
        yield
    torch_dist.destroy_process_group()
    for module, values in remembered.items():
        vars(module).update(values)
    # a fork that collects what is left of the group would wait for its threads for ever
    gc.collect()
