"""Which architectures have a load-balancing loss."""

import pytest
from every_architecture import ARCHITECTURES, config_of

from dschat_ppo.engine.router_term import router_top_k
from dschat_ppo.errors import UserError
from dschat_ppo.tools import toy

TOP_K = {"GPT-OSS": 2, "Mixtral": 2, "Qwen2-MoE": 2, "Qwen3-MoE": 2}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_have_a_router_loss_or_are_refused(name):
    config = config_of(name, toy.make_tokenizer(["a few words"]))
    if name in TOP_K:
        assert router_top_k(config, "--model_name_or_path m") == TOP_K[name]
        return
    with pytest.raises(UserError, match=r"^--router_loss_coef: --model_name_or_path m: .*omit the flag$"):
        router_top_k(config, "--model_name_or_path m")
