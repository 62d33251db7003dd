"""A process group of one rank inside the test process, for tests that build real DeepSpeed engines.

`from one_rank import one_rank  # noqa: F401`, then `pytestmark = pytest.mark.usefixtures("one_rank")`.
"""

import os

import pytest
import torch
import torch.distributed as torch_dist

from dschat_ppo.run.op_builds import folder_of_environment, guard_builds


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Join a group of one; at the end leave it and reset what DeepSpeed remembers of it."""
    from deepspeed.comm import comm
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.utils import groups

    store = tmp_path_factory.mktemp("group") / "store"
    remembered = {module: dict(vars(module)) for module in (comm, groups)}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch_dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # DeepSpeed asks for it
        # Operators are compiled as in a run: in the folder of launched ranks, and no killed process blocks them.
        patch.setenv("TORCH_EXTENSIONS_DIR", os.environ.get("TORCH_EXTENSIONS_DIR", str(folder_of_environment())))
        patch.setattr(OpBuilder, "jit_load", OpBuilder.jit_load)
        guard_builds()
        yield
    torch_dist.destroy_process_group()
    for module, values in remembered.items():
        vars(module).update(values)
