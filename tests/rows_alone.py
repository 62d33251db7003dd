"""Oracle of forward passes: tiny models of several architectures, rows, and each row alone in plain
transformers."""

import torch
import transformers
from tiny_models import KINDS, VOCABULARY, new_model

from dschat_ppo.types import ForbiddenTokens, Rollout

# lengths of the rows' prompts: three answers to one, four to another, two alone
PROMPTS = (11, 11, 11, 9, 9, 9, 9, 10, 1)
ANSWERS = (6, 3, 1, 0, 5, 5, 8, 4, 3)
ORDER = (4, 0, 7, 8, 5, 1, 3, 6, 2)  # of the rows in the rollout
TEMPERATURE = 0.8
# These let their attention be replaced and have no soft caps.
PACKED = (
    "llama",
    "llama tied",
    "mistral-window",
    "gpt2",
    "opt-350m",
    "phi",
    "gemma3",
    "cohere",
    "granite",
)
FAMILIES = (*PACKED, "bloom", "gpt-neo", "gemma2")
SCALED = {"cohere": {"logit_scale": 0.25}, "granite": {"logits_scaling": 4.0}}  # their logits


def model_of(name: str, scalar: bool = False):
    """A causal model, with a `score` head for a `ScalarModel` if asked, without dropout."""
    if name in SCALED:
        torch.manual_seed(1)
        kind, settings = (
            getattr(transformers, f"{name.title()}ForCausalLM"),
            {**KINDS["llama"][2], **SCALED[name]},
        )
        model = kind(kind.config_class(**settings)).eval()
    else:
        changes = (
            {"init_std": 0.2, "dropout": 0.0} if name == "opt-350m" else {"initializer_range": 0.2}
        )
        model = new_model(name.split()[0], tie_word_embeddings="tied" in name, **changes)
    for parameter_name, parameter in model.named_parameters():
        # they are initialised to 0, where no test would notice them
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    if scalar:
        model.score = torch.nn.Linear(model.get_output_embeddings().in_features, 1, bias=False)
    return without_dropout(model)


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attn_pdrop = model.config.attention_dropout = model.config.dropout = 0.0
    return model


def rollout(padding_seed: int = 0) -> Rollout:
    """Nine rows with four prompts; two answers are the same, one is empty; random ids in
    padding."""
    generator, of_padding = (torch.Generator().manual_seed(seed) for seed in (3, padding_seed))
    drawn = {
        size: torch.randint(0, VOCABULARY, (max(PROMPTS),), generator=generator)
        for size in sorted({*PROMPTS})
    }
    prompt_ids = torch.stack([drawn[size] for size in PROMPTS])
    response_ids = torch.randint(0, VOCABULARY, (len(ANSWERS), max(ANSWERS)), generator=generator)
    response_ids[5] = response_ids[4]
    prompt_mask = torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS).unsqueeze(1)
    response_mask = torch.arange(max(ANSWERS)) < torch.tensor(ANSWERS).unsqueeze(1)

    def padded(ids, mask):
        filler = torch.randint(0, VOCABULARY, ids.shape, generator=of_padding)
        return torch.where(mask, ids, filler)[torch.tensor(ORDER)], mask[torch.tensor(ORDER)]

    zeros = torch.zeros(response_mask.shape)
    return Rollout(
        *padded(prompt_ids, prompt_mask),
        *padded(response_ids, response_mask),
        zeros,
        zeros[:, 0].bool(),
    )


def rows_alone(rows: Rollout):
    """(prompt length, real tokens (1, n)) of each row."""
    for prompt, p_mask, response, r_mask in zip(
        rows.prompt_ids, rows.prompt_mask, rows.response_ids, rows.response_mask, strict=True
    ):
        yield int(p_mask.sum()), torch.cat([prompt[p_mask], response[r_mask]]).unsqueeze(0)


def both(scores) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.logprobs, scores.entropy


def scores_alone(lm, rows: Rollout, ends: ForbiddenTokens | None = None):
    """Log-probs and entropies, (total response tokens), row by row without padding."""
    logprobs, entropies = [], []
    for start, ids in rows_alone(rows):
        logits = lm(input_ids=ids, use_cache=False).logits[0, start - 1 : -1] / TEMPERATURE
        kept = torch.ones_like(logits, dtype=torch.bool)
        if ends is not None:
            kept[: ends.minimum, list(ends.ends)] = False
        table = torch.log_softmax(logits.masked_fill(~kept, -torch.inf), dim=-1)
        logprobs.append(table.gather(1, ids[0, start:].unsqueeze(1)).squeeze(1))
        entropies.append(-(table.exp() * table.masked_fill(~kept, 0.0)).sum(dim=1))
    return torch.cat(logprobs), torch.cat(entropies)


def values_alone(classifier, rows: Rollout) -> list[torch.Tensor]:
    """Scores of all tokens (n,) of each row without padding."""
    return [
        classifier.score(classifier.base_model(input_ids=ids).last_hidden_state)[0, :, 0]
        for _, ids in rows_alone(rows)
    ]


def assert_same_gradients(found, expected, parameters: dict, atol: float = 3e-5) -> None:
    """Of two losses in all `parameters`; one that does not take part in one takes part in
    neither."""
    gradients = (
        torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for loss in (found, expected)
    )
    for key, a, b in zip(parameters, *gradients, strict=True):
        if b is None:
            assert a is None, key
        else:
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
            )
