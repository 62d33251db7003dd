"""Architectures: positions, head formats, reward models without transformers' class, and refused configurations."""

from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from tiny_models import plain_logprobs, prompts_of
from transformers import AutoTokenizer

from dschat_ppo.errors import UserError
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_sequence_classifier,
    load_causal_lm,
    load_sequence_classifier,
)
from dschat_ppo.models.saving import save_model
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria

VOCABULARY = 60
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 40, "initializer_range": 0.3, "pad_token_id": 1,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
ROBERTA = {**SIZES, "is_decoder": True}
ROBERTAS = {
    "roberta": (hf.RobertaConfig(**ROBERTA), hf.RobertaForCausalLM),
    "xlm-roberta-xl": (hf.XLMRobertaXLConfig(**ROBERTA), hf.XLMRobertaXLForCausalLM),
}
MODELS = {
    **ROBERTAS,
    "codegen": (
        hf.CodeGenConfig(
            vocab_size=VOCABULARY, n_positions=40, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, initializer_range=0.3,
        ),
        hf.CodeGenForCausalLM,
    ),
    "llama4": (
        hf.Llama4TextConfig(**GROUPED, intermediate_size_mlp=48, num_local_experts=4), hf.Llama4ForCausalLM,
    ),
    "mamba": (
        hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4), hf.MambaForCausalLM,
    ),
    "olmoe": (hf.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2), hf.OlmoeForCausalLM),
}  # fmt: skip
LENGTHS = torch.tensor([7, 12, 3])
IDS = torch.randint(2, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
REAL = torch.arange(12) < LENGTHS.unsqueeze(1)


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request, tmp_path_factory):
    """(language model in fp32, its folder)."""
    config, kind = MODELS[request.param]
    torch.manual_seed(1)
    lm, folder = kind(config).eval().float(), tmp_path_factory.mktemp("lm")
    lm.save_pretrained(folder)
    return lm, str(folder)


@torch.no_grad()
def test_logprobs_are_those_of_each_row_alone(saved):
    """The expected numbers come from a forward pass without positions or a mask."""
    lm, folder = saved
    alone = []
    for row, length in zip(IDS, LENGTHS, strict=True):
        ids = row[:length].unsqueeze(0)
        table = torch.log_softmax(lm(input_ids=ids, use_cache=False).logits[0, :-1].double(), dim=-1)
        alone.append(table.gather(1, ids[0, 1:, None]).squeeze(1))
    policy = PolicyModel(load_causal_lm(folder, "fp32", None)).eval()
    select_kernels(policy)
    torch.testing.assert_close(policy(IDS, REAL)[0].double(), torch.cat(alone), rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_reward_model_is_built_saved_and_loaded(saved, assets, tmp_path):
    """The backbone has the language model's weights, the score is head times last state, and both survive saving."""
    lm, folder = saved
    torch.manual_seed(2)
    model = ScalarModel(load_sequence_classifier(folder, "fp32", None, new_head=True)).eval()
    torch.nn.init.normal_(model.classifier.score.weight)
    select_kernels(model)
    scores = model(IDS, LENGTHS, last_only=True)
    expected = []
    for row, length in zip(IDS, LENGTHS, strict=True):
        backbone = lm.model if lm.base_model is lm else lm.base_model
        states = backbone(input_ids=row[:length].unsqueeze(0), use_cache=False).last_hidden_state
        expected.append(model.classifier.score(states[0, -1]))
    torch.testing.assert_close(scores, torch.cat(expected), rtol=1e-5, atol=1e-4)
    again = tmp_path / "again"
    save_model(SimpleNamespace(module=model), AutoTokenizer.from_pretrained(assets / "lm"), again)
    assert check_sequence_classifier(str(again), new_head=False) is False
    loaded = ScalarModel(load_sequence_classifier(str(again), "fp32", None, new_head=False), model.layout).eval()
    torch.testing.assert_close(loaded(IDS, LENGTHS, last_only=True), scores, rtol=0, atol=1e-6)
    in_bf16 = ScalarModel(load_sequence_classifier(str(again), "bf16", None, new_head=False)).eval()
    select_kernels(in_bf16)
    assert torch.isfinite(in_bf16(IDS, LENGTHS, last_only=True)).all()


@pytest.mark.parametrize(("name", "engine"), [("roberta", "continuous"), ("xlm-roberta-xl", "padded")])
def test_responses_are_generated_at_positions_after_padding(name, engine):
    """PAD ends a response, because the plain forward pass would not count it as a position."""
    config, kind = ROBERTAS[name]
    torch.manual_seed(1)
    model = kind(config).eval().float()
    how = GenerationConfig(
        SamplingParameters(temperature=0.8), StoppingCriteria(8, eos_ids=(1, 2)), rows=3, engine=engine
    )
    prompts = prompts_of((1, 9, 20, 5))
    rollout = generate(model, prompts, torch.arange(4), how)
    assert rollout.response_mask.sum() > 8
    torch.testing.assert_close(rollout.rollout_logprobs, plain_logprobs(model, rollout, 0.8), atol=1e-4, rtol=0)


def test_a_multimodal_configuration_gives_the_reward_model_of_its_text_part(tmp_path):
    config, kind = MODELS["llama4"]
    kind(config).save_pretrained(tmp_path)
    hf.Llama4Config(text_config=config.to_dict()).save_pretrained(tmp_path)
    model = load_sequence_classifier(str(tmp_path), "fp32", None, new_head=True)
    assert type(model).__name__ == "Llama4WithScalarHead"
    assert type(model.config) is hf.Llama4TextConfig
    assert model.config.num_labels == 1


@pytest.mark.parametrize(("config", "reason"), [
    (hf.BertConfig(), "BertConfig without is_decoder is an encoder"),
    (hf.MllamaConfig(), "saved with MllamaTextConfig"),
    (hf.Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional_attention"),
    (hf.XLNetConfig(), "XLNetConfig is not supported: its tokens see later tokens"),
    (hf.RobertaConfig(is_decoder=True, pad_token_id=None), "RobertaConfig counts positions from pad_token_id"),
])  # fmt: skip
def test_models_that_are_not_decoders_are_refused_from_the_configuration_alone(tmp_path, config, reason):
    config.save_pretrained(tmp_path)  # there are no weights
    for check in (check_causal_lm, lambda folder: check_sequence_classifier(folder, new_head=True)):
        with pytest.raises(UserError, match=reason) as raised:
            check(str(tmp_path))
        assert "\n" not in str(raised.value)
