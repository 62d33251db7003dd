"""Parts of a model, what it holds and what its passes need: hand arithmetic, and activations
against a real pass."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers
from every_architecture import ARCHITECTURES
from one_rank import one_rank  # noqa: F401
from tiny_models import VOCABULARY, model_of
from torch import nn
from transformers import LlamaConfig, LlamaModel

from dschat_ppo.config.cli import parse
from dschat_ppo.config.run_flags import MemoryFlags
from dschat_ppo.engine.build_engine import OptimizerSettings, train_engine
from dschat_ppo.engine.ds_config import ZeroOptions, train_config
from dschat_ppo.engine.optimizers import ADAMW
from dschat_ppo.models.adapters.settings import AdapterSettings
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.models.loading import DTYPES, ModelChanges
from dschat_ppo.models.packing import padded_rows
from dschat_ppo.planner import role_memory
from dschat_ppo.planner.model_parts import (
    ModelSizes,
    SavedActivations,
    read_model_configs,
    saved_activations,
    sizes_of,
)
from dschat_ppo.planner.role_memory import Role

ATTENTION, MLP = 64 * 64 + 2 * 64 * 32 + 64 * 64, 3 * 64 * 160
LAYER = ATTENTION + MLP + 2 * 64
LORA = AdapterSettings(8, 32.0, 0.0, None, False, False, freeze_base=True)


def llama(**settings):
    return LlamaConfig(
        **{
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            **settings,
        }
    )


def test_a_language_model():
    counted = sizes_of(llama(), "bf16", scalar=False)
    assert (counted.layers, counted.layer, counted.head) == (3 * LAYER, LAYER, 100 * 64)
    assert counted.total == counted.trained == 3 * LAYER + 2 * 6400 + 64
    # layers, keys and values, heads, numbers of a head, bytes
    assert counted.kv_bytes == 3 * 2 * 2 * 16 * 2
    assert (
        counted.cache_bytes(10) == 10 * counted.kv_bytes
        and counted.vocabulary == 100
        and counted.largest == 64 * 160
    )
    # a layer of attention, one with a state
    hybrid = sizes_of(model_of("lfm2").config, "fp32", scalar=False)
    assert hybrid.cache_bytes(10) == 10 * 2 * 2 * 8 * 4 + 2 * 3 * 32 * 4
    tied = sizes_of(llama(tie_word_embeddings=True), "bf16", scalar=False)
    assert (tied.head, tied.total) == (6400, 3 * LAYER + 6400 + 64)  # counts once
    reward = sizes_of(llama(), "fp32", scalar=True)
    assert (reward.head, reward.vocabulary, reward.kv_bytes, reward.total) == (
        64,
        1,
        0,
        3 * LAYER + 6400 + 64 + 64,
    )


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture_counts(name):
    kind, settings = ARCHITECTURES[name]
    config = getattr(transformers, kind)(
        **{"vocab_size": VOCABULARY, "pad_token_id": 0, **settings}
    )
    counted = sizes_of(config, "bf16", scalar=False)
    assert counted.saved.layer > 0 and len(counted.saved.layers) == 2 and counted.kv_bytes > 0
    assert counted.total >= counted.layers >= counted.layer > 0
    assert sizes_of(config, "bf16", scalar=True).total > 0


def test_lora_trains_its_matrices_alone():
    counted = sizes_of(llama(), "bf16", False, ModelChanges(adapter=LORA))
    sizes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 160), (64, 160), (160, 64)]
    assert counted.trained == 3 * sum(8 * (rows + columns) for rows, columns in sizes)
    assert counted.adapted == 3 * (ATTENTION + MLP)
    # its matrices keep the inputs that trained weights would keep, and 8 numbers each between two
    full = sizes_of(llama(), "bf16", False).saved.layers
    assert counted.saved.layers[1:] == tuple(layer + 7 * 8 * 2 for layer in full[1:])


def model_folder(root, name, kind):
    (root / name).mkdir()
    config = llama(vocab_size=VOCABULARY, architectures=[kind]).to_dict()
    (root / name / "config.json").write_text(json.dumps(config))
    return str(root / name)


def test_configurations_are_those_of_the_roles(tmp_path):
    actor, critic = (
        model_folder(tmp_path, name, f"LlamaFor{kind}")
        for name, kind in (("a", "CausalLM"), ("c", "SequenceClassification"))
    )
    words = ["--actor_model_name_or_path", actor, "--critic_model_name_or_path", critic]
    words += ["--data_path", "d", "--output_dir", "o"]
    assert list(read_model_configs(parse("ppo", words))) == [
        "actor",
        "reference",
        "critic",
        "reward",
    ]
    grpo = [
        "--advantage_estimator",
        "grpo",
        "--n_samples_per_prompt",
        "4",
        "--kl_coef",
        "0",
        "--use_reward_model",
        "False",
        "--reward_function",
        "length",
    ]
    assert list(read_model_configs(parse("ppo", [*words, *grpo]))) == ["actor"]
    one = parse("sft", ["--model_name_or_path", actor, "--data_path", "d", "--output_dir", "o"])
    assert read_model_configs(one)["model"].hidden_size == 64


def test_layers_with_kernels_keep_less():
    """On a GPU they have some in half precision alone."""

    def kept(dtype: str, on_gpu: bool) -> int:
        return sizes_of(llama(), dtype, False, on_gpu=on_gpu).saved.whole

    assert kept("bf16", True) == kept("fp16", True) == kept("bf16", False)
    assert kept("fp32", False) < 0.9 * kept("fp32", True)
    # per layer, as below: 3 layers whose norms, attention and MLP save no fp32 copies
    per_layer = 2 * (2 * 64 + 2 * 64) + 2 * (64 + 32 + 32 + 64) + 4 * 4 + 3 * 2 * 160
    assert kept("bf16", True) == pytest.approx(3 * per_layer, rel=0.1)


def backbone(device="meta", dtype=torch.bfloat16):
    with torch.device(device):
        return LlamaModel(llama(vocab_size=50)).to(dtype)


def test_a_layer_of_a_llama_saves_what_hand_arithmetic_gives():
    # fp32 input, 1 / root, output before and after the weight
    norms = 2 * (4 * 64 + 4 + 2 * 64 + 2 * 64)
    # queries, keys, values, output; a log-sum for each head
    attention = 2 * (64 + 32 + 32 + 64) + 4 * 4
    mlp = 4 * 2 * 160
    found = saved_activations(backbone())
    assert len(found.layers) == 3
    # the first one saves the rotary table too
    assert found.layers[1:] == (norms + attention + mlp,) * 2
    assert found.layer_input == 2 * 64


def saved_by_a_pass(model) -> float:
    """Bytes per token that a real forward pass over 256 tokens saves, without weights."""
    held, weights = {}, {weight.data_ptr() for weight in model.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, 256, dtype=torch.int64), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values()) / 256


def test_the_count_is_that_of_a_real_forward_pass_in_fp32():
    """The kernel of PyTorch on a CPU saves the same as the stand-in of the count."""
    real = saved_by_a_pass(backbone("cpu", torch.float32))
    assert saved_activations(backbone(dtype=torch.float32)).whole == pytest.approx(real, rel=0.02)


def test_layers_with_kernels_save_what_a_real_pass_in_bf16_saves():
    norms = 2 * (2 * 64 + 2 * 64)  # input and output in bf16
    attention = 2 * (64 + 32 + 32 + 64) + 4 * 4
    mlp = 3 * 2 * 160  # both first products and their gated product
    planned, model = backbone(), backbone("cpu")
    for made in (planned, model):
        use_fast_layers(made)
    assert saved_activations(planned).layers[1:] == (norms + attention + mlp,) * 2
    with padded_rows(model, "auto", True).running():
        assert saved_activations(planned).whole == pytest.approx(saved_by_a_pass(model), rel=0.02)


SAVED = SavedActivations((100, 120), 20, 16)
SIZES = ModelSizes(
    config=LlamaConfig(),
    total=1000,
    layers=400,
    layer=200,
    trained=1000,
    adapted=0,
    taken={},
    largest=300,
    hidden=8,
    vocabulary=50,
    kv_bytes=64,
    state_bytes=0,
    saved=SAVED,
)


def role(stage=1, dtype="bf16", ranks=4, **settings):
    running = 1 if stage == 0 and dtype != "fp32" else stage
    return Role("actor", SIZES, dtype, ranks, running, **settings)


SETTINGS = OptimizerSettings(0.01, 0.0, "linear", 0, 20, (0.9, 0.95), 1e-8)


def sized(planned, **changes):
    return replace(planned, sizes=replace(SIZES, **changes))


OF_ONE_STATE = replace(ADAMW, name="one", state_names=("momentum",))
TAKEN = {"one": 400}
LARGE = sized(role(2, on_gpu=True), trained=4 * 10**8, total=4 * 10**8)
BUFFER = 4 * 300  # of the largest parameter, in fp32
# (part, role, bytes on the device, in host memory): 1,000 parameters train on 4 ranks, and fit into
# one bucket
HELD = [
    ("weights", role(0, "bf16"), 2000, 0),
    ("weights", role(0, "fp32"), 4000, 0),
    ("weights", role(3), 500, 0),
    ("weights", role(3, offloads_weights=True), 0, 500),
    ("weights", role(3, kept_whole=True), 500 + 2000, 0),
    ("weights", role(3, kept_whole=True, ranks=1), 2000, 0),  # the whole ones are the part
    ("weights", sized(role(2, bits=4), adapted=400), 2000 - 600, 0),
    ("weights", sized(role(2, bits=8), adapted=400), 2000 - 400, 0),
    ("optimizer", role(1), 12 * 250, 0),
    ("optimizer", role(3), 12 * 250, 0),
    ("optimizer", role(2, "fp32"), 3000, 0),
    ("optimizer", role(0, "fp32"), 8 * 1000, 0),
    ("optimizer", sized(role(1, optimizer=OF_ONE_STATE), taken=TAKEN), 12 * 250 - 4 * 100, 0),
    ("optimizer", sized(role(1), taken=TAKEN), 12 * 250, 0),
    ("optimizer", role(2, offloads_optimizer=True), BUFFER, 250 * (12 + 4 + 2) + BUFFER),
    ("optimizer", role(3, offloads_optimizer=True), 0, 250 * (12 + 4)),
    ("gradients", role(1), 4 * 1000, 0),
    ("gradients", role(1, "fp16"), 0, 0),
    ("gradients", role(3), 4 * 250, 0),
    ("gradients", role(3, "fp16"), 2 * 250, 0),
    ("gradients", role(0, "fp32"), 0, 0),
    ("gradients", role(3, offloads_optimizer=True), 0, 1000),
    ("buffers", role(3), 2000, 0),
    ("buffers", role(2), 0, 0),
]
PASSES = [  # (property or function, role, bytes)
    ("gathered", role(3), 2000),
    ("gathered", role(3, offloads_weights=True, ranks=1), 2000),
    ("gathered", role(3, ranks=1), 0),
    ("gathered", role(3, kept_whole=True), 0),
    ("gathered", role(2), 0),
    ("gathered", sized(role(3), total=3 * 10**9), 2 * 10**9),  # at most a billion numbers
    ("update_gradients", role(0, "fp32"), 4 * 1000 + 4 * 1000),
    ("update_gradients", role(0, "fp32", ranks=1), 4000),
    ("update_gradients", role(1), 4 * 1000),
    ("update_gradients", role(1, ranks=1), (2 + 4) * 300),
    ("update_gradients", role(1, "fp16"), 2 * 1000 + 2 * 1000 + 4 * 250),
    ("update_gradients", role(3), 2 * 1000),
    (
        "update_gradients",
        role(2, offloads_optimizer=True),
        2 * 1000 + 2 * 1000,
    ),  # sums are in host memory
    ("update_gradients", sized(role(1, on_gpu=True), trained=6 * 10**8), (2 + 4) * 300),
    ("update_gradients", LARGE, 2 * 10**8 * 2 + 4 * 10**8),  # a bucket twice, 4 T / N
    ("update_gradients", replace(LARGE, stage=3), 2 * 10**8),
]


def totals(held):
    """(part, whether in host memory) -> bytes."""
    found = Counter()
    for part, size, on_host in held:
        found[part, on_host] += size
    return found


@pytest.mark.parametrize(("part", "planned", "device", "host"), HELD)
def test_what_a_model_holds(part, planned, device, host):
    found = totals(role_memory.steady_bytes(planned))
    assert (found[part, False], found[part, True]) == (device, host)


@pytest.mark.parametrize(("name", "planned", "size"), PASSES)
def test_what_a_pass_needs(name, planned, size):
    assert (
        planned.gathered if name == "gathered" else role_memory.update_gradients(planned)
    ) == size


def test_frozen_models_hold_weights_alone():
    frozen = sized(role(3, offloads_optimizer=True), trained=0)
    assert +totals(role_memory.steady_bytes(frozen)) == {("weights", False): 500}
    assert role_memory.accumulated_gradients(frozen) == role_memory.update_gradients(frozen) == 0


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("stage", "dtype", "offloads"),
    [
        (0, "fp32", False),
        (0, "bf16", False),
        (0, "bf16", True),
        (1, "fp32", True),
        (2, "fp32", False),
        (2, "bf16", False),
        (3, "bf16", False),
    ],
)
def test_gradients_between_micro_batches_are_those_of_an_engine(stage, dtype, offloads):
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 10, bias=False)).to(
        DTYPES[dtype]
    )
    options = ZeroOptions(MemoryFlags(offload_optimizer=offloads))
    config = train_config(stage, dtype, False, 1, 1.0, None, options)
    engine = train_engine(model, config, SETTINGS)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(
        engine(torch.ones(2, 20, dtype=DTYPES[dtype])).float().sum(), scale_wrt_gas=False
    )
    held = [
        getattr(weight, name, None)
        for weight in engine.module.parameters()
        for name in ("grad", "grad_accum")
    ]
    held += getattr(engine.optimizer, "fp32_groups_gradients_flat", [])
    for name in ("all_grad_tensors", "averaged_gradients"):
        held += [
            part for parts in getattr(engine.optimizer, name, {}).values() for part in parts or []
        ]
    size = sum({part.data_ptr(): part.nbytes for part in held if part is not None}.values())
    planned = sized(role(stage, dtype, ranks=1, offloads_optimizer=offloads), trained=900)
    held = totals(role_memory.steady_bytes(planned))
    assert (
        role_memory.accumulated_gradients(planned)
        + held["gradients", False]
        + held["gradients", True]
        == size
    )


def test_activations_in_proportion_to_tokens_with_checkpointing_and_on_the_host():
    def needed(planned, on_host=False):
        found = totals(role_memory.activations(planned, 10, on_host))
        return found["activations", False] / 10, found["activations", True] / 10

    # on a CPU it has no effect
    assert needed(role()) == needed(role(), on_host=True) == (100 + 120 + 20, 0)
    # with checkpointing, the inputs of the layers and the layer that runs again
    assert needed(role(checkpoints=True)) == (2 * 16 + 20 + 120, 0)
    assert needed(role(on_gpu=True), on_host=True) == (120, 240)
    assert needed(role(on_gpu=True, checkpoints=True), on_host=True) == (120 * 2, 2 * 16 + 20)


def test_running_rows():
    assert role_memory.running_rows(role(), 8, 20, 0, free=10**9) == 8
    assert role_memory.running_rows(role(), 8, 20, 5, free=10**9) == 5
    # half of what is free
    assert role_memory.running_rows(role(), 8, 20, 0, free=2 * 3 * 20 * 64) == 3
    row = 20 * 64 + 24 * 50
    assert role_memory.running_rows(role(on_gpu=True), 800, 20, 200, free=100 * row) == 100
    # a tenth is for logits
    assert role_memory.running_rows(role(on_gpu=True), 800, 20, 0, free=100 * row) == 20
    assert role_memory.running_rows(role(on_gpu=True), 8, 20, 0, free=-5) == 1
