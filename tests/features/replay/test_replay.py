"""`python -m dschat_ppo.tools.replay`: bundles of every loss reproduce the number and print where
it comes from."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_config
from tiny_experience import record
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.algorithms.divergence import Divergence
from dschat_ppo.checkpoint.state_files import load_state, save_state
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.data.supervised_batches import LabelledBatch, PairBatch
from dschat_ppo.engine.optimizer_step import Fault, random_state
from dschat_ppo.features.replay import replayed_step
from dschat_ppo.features.replay.bad_steps import ReproBundles
from dschat_ppo.features.replay.programs import main
from dschat_ppo.features.replay.replayed_step import first_bad_output
from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.wrapped_models import PolicyModel, ScalarModel, Teaching
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite import BadStep
from dschat_ppo.ppo.mini_dataset import MiniBatch
from dschat_ppo.ppo.token_losses import ActorLoss, critic_loss
from dschat_ppo.supervised.sft import SFTTerm, sft_loss
from dschat_ppo.types import Experience, ForbiddenTokens, RewardedRollout

POISON = 301  # a token whose embedding is not finite in a poisoned model
WORDS = {
    "sft": "--model_name_or_path {lm}",
    "reward": "--model_name_or_path {lm}",
    "ppo": (
        "--actor_model_name_or_path {lm} --critic_model_name_or_path {reward} --entropy_coef 0.01"
    ),
}


def engine_of(kind: str, poisoned: bool = False, **changes) -> SimpleNamespace:
    """Stands for a DeepSpeed engine in fp32."""
    torch.manual_seed(3)
    config = tiny_config(num_labels=1, **changes)
    policy = kind == "policy"
    model = (
        PolicyModel(LlamaForCausalLM(config))
        if policy
        else ScalarModel(LlamaForSequenceClassification(config))
    )
    if poisoned:
        with torch.no_grad():
            model.backbone.embed_tokens.weight[POISON, 3] = math.nan
    return SimpleNamespace(module=model, fp16_enabled=lambda: False)


def config_of(assets, out, step: str, *words: str):
    known = WORDS[step].format(lm=assets / "lm", reward=assets / "reward")
    return parse(
        step,
        [*known.split(), "--data_path", "d", "--output_dir", str(out), "--dtype", "fp32", *words],
    )


def bundle(assets, out, step, role, engine, records, constants, words=()) -> str:
    bundles = ReproBundles(
        config_of(assets, out, step, *words), AutoTokenizer.from_pretrained(assets / "lm")
    )
    fault = Fault("loss", 0, len(records) - 1, [], random_state())
    return str(bundles.write(BadStep(role, 7, fault, engine, records, constants)))


def ids(*rows: list[int]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


GOOD_SFT = SFTBatch(
    ids([9, 8, 7], [6, 5]), torch.tensor([[False, True, True], [False, True, False]])
)
BAD_SFT = SFTBatch(
    ids([11, 12, 13], [14, POISON, 15], [16, 17]),
    torch.tensor([[False, True, True], [False, False, True], [False, True, False]]),
)
PAIRS = PairBatch(
    ids([11, 12, 13], [14, 15], [21, 22], [23, POISON, 24]),  # two chosen, two rejected
    lengths=torch.tensor([3, 2, 2, 3]),
    answer_mask=torch.tensor(
        [[False, True, True], [False, True, False], [False, True, False], [False, True, True]]
    ),
    pair_mask=torch.tensor([True, True]),
    margin=torch.zeros(2),
)
DPO = replace(PAIRS, ref_logprobs=torch.zeros(4, dtype=torch.float64))
KTO = LabelledBatch(
    BAD_SFT.input_ids,
    BAD_SFT.loss_mask,
    torch.tensor([True, False, True]),
    torch.ones(3, dtype=torch.bool),
    BAD_SFT.input_ids[[2, 0, 2]],
    BAD_SFT.loss_mask,
    torch.tensor([3, 3, 2]),
    ref_logprobs=torch.zeros(3, 2, dtype=torch.float64),
    baseline=torch.full((3,), 0.5, dtype=torch.float64),
)


def experience(poisoned_row: int | None = None) -> Experience:
    """Three answers of 2, 0 and 1 tokens."""
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    prompts = torch.tensor([[0, 7], [8, 9], [5, 6]])
    if poisoned_row is not None:
        prompts[poisoned_row, 1] = POISON
    return record(
        Experience,
        mask,
        prompt_ids=prompts,
        prompt_mask=torch.tensor([[False, True], [True, True], [True, True]]),
        response_ids=torch.tensor([[31, 32], [0, 0], [33, 0]]),
        old_logprobs=-5.0 * mask,
        advantages=1.0 * mask,
        returns=0.5 * mask,
        loss_weights=1.0 * mask,
    )


MINIBATCH = MiniBatch(
    [], Denominators(tokens=6.0, rows=4.0, constant=12.0), value_tokens=6.0, metric_weight=0.25
)
CONSTANTS = {
    "denominators": {"tokens": 6.0, "rows": 4.0, "constant": 12.0},
    "value_tokens": 6.0,
    "metric_weight": 0.25,
}
ACTOR = {**CONSTANTS, "entropy_coef": 0.01, "forbidden_tokens": None}

# name -> (step, role, kind of model, good records and then the bad one, constants, further words)
CASES = {
    "sft": (
        "sft",
        "model",
        "policy",
        [GOOD_SFT, BAD_SFT],
        {"total": 7.0, "rows": [[4, 9], [30, 31, -1]]},
        (),
    ),
    "reward": ("reward", "model", "scalar", [PAIRS], {"total": 2.0, "rows": [[5, 6]]}, ()),
    "dpo": (
        "reward",
        "model",
        "policy",
        [DPO],
        {"total": 2.0, "rows": [[5, 6]]},
        ("--objective", "dpo"),
    ),
    "orpo": (
        "reward",
        "model",
        "policy",
        [PAIRS],
        {"total": 2.0, "rows": [[5, 6]]},
        ("--objective", "orpo"),
    ),
    "kto": (
        "reward",
        "model",
        "policy",
        [KTO],
        {"total": 3.0, "rows": [[5, 6, 7]]},
        ("--objective", "kto"),
    ),
    "actor": ("ppo", "actor", "policy", [experience(), experience(2)], ACTOR, ()),
    "actor, whole distributions": (
        "ppo",
        "actor",
        "policy",
        [experience(), experience(2)],
        ACTOR,
        ("--kl_loss_coef", "0.1", "--kl_loss_estimator", "full"),
    ),
    "critic": ("ppo", "critic", "scalar", [experience(), experience(0)], CONSTANTS, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_token_is_found_in_every_loss(assets, tmp_path, capsys, case):
    step, role, kind, records, constants, words = CASES[case]
    assert (
        main(
            [
                bundle(
                    assets,
                    tmp_path,
                    step,
                    role,
                    engine_of(kind, poisoned=True),
                    records,
                    constants,
                    words,
                )
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "weights that are not finite, 1 parameters: " in said
    assert re.search(
        r"first output that is not finite: \S+\.embed_tokens \(Embedding; its inputs are finite\)",
        said,
    )
    last = len(records) - 1
    assert f"micro-batch {last}: loss nan" in said and "gradients that are not finite" in said
    for number in range(last):
        assert re.search(rf"micro-batch {number}: loss -?\d", said), (
            "what comes before it is finite"
        )
    rows = constants.get("rows")
    assert (
        main([bundle(assets, tmp_path, step, role, engine_of(kind), records, constants, words)])
        == 1
    )
    healthy = capsys.readouterr().out
    assert healthy.endswith("all numbers are finite\n") and "not finite:" not in healthy
    assert (
        f"micro-batch {last} has rows {rows and rows[last]} of the training split, from 0" in said
    ) is bool(rows)


def losses_said(said: str) -> list[float]:
    return [float(number) for number in re.findall(r"micro-batch \d+: loss (\S+)", said)]


def test_losses_match_the_run_including_dropout(assets, tmp_path, capsys):
    engine = engine_of("policy", attention_dropout=0.5)
    engine.module.train()
    torch.manual_seed(17)
    torch.rand(5)
    state = random_state()
    losses = [
        sft_loss(engine.module, batch, torch.tensor(7.0), MetricSums()).item()
        for batch in (GOOD_SFT, BAD_SFT)
    ]
    torch.set_rng_state(state[0])
    torch.rand(1)
    other = [
        sft_loss(engine.module, batch, torch.tensor(7.0), MetricSums()).item()
        for batch in (GOOD_SFT, BAD_SFT)
    ]
    assert other != losses, "dropout has no effect on this model"
    torch.set_rng_state(state[0])
    folder = bundle(assets, tmp_path, "sft", "model", engine, [GOOD_SFT, BAD_SFT], {"total": 7.0})
    torch.manual_seed(99)
    assert main([folder]) == 1
    assert losses_said(capsys.readouterr().out) == pytest.approx(losses, rel=1e-6)


def test_the_loss_of_step_1_has_the_terms_of_features(assets, tmp_path, capsys, monkeypatch):
    engine = engine_of("policy")
    other = PolicyModel(LlamaForCausalLM.from_pretrained(assets / "lm"))

    @torch.no_grad()
    def distribution(batch):
        _, _, hidden = other(batch.input_ids, batch.loss_mask, states=True)
        return Teaching(other.output_layer(hidden), Divergence("jsd", 0.3))

    term = SFTTerm("divergence", 0.5, distribution)
    by_run = sft_loss(engine.module, GOOD_SFT, torch.tensor(7.0), MetricSums(), [term]).item()
    monkeypatch.setattr(replayed_step, "sft_terms", lambda config, frozen: [term])
    main([bundle(assets, tmp_path, "sft", "model", engine, [GOOD_SFT], {"total": 7.0})])
    assert losses_said(capsys.readouterr().out) == pytest.approx([by_run], rel=1e-6)


def losses_of_texts(config, model, constants, sums):
    """Of the micro-batches that a term of the optimizer step has added."""
    coef = constants["entropy_coef"]
    return {SFTBatch: lambda batch: coef * model(batch.input_ids, batch.loss_mask)[0].sum()}


@pytest.mark.parametrize("scored", [True, False], ids=["scored before", "one optimizer step"])
def test_losses_of_actor_and_critic_match_the_run(assets, tmp_path, capsys, monkeypatch, scored):
    """In a PPO step of one optimizer step, the pass of the update gives old log-probs and
    values."""
    monkeypatch.setattr(
        "dschat_ppo.features.replay.replayed_step.hooks", lambda name: [losses_of_texts]
    )
    config = config_of(assets, tmp_path, "ppo")
    actor, critic, rows = engine_of("policy"), engine_of("scalar"), experience()
    loss = ActorLoss(
        actor.module, config.algorithm, config.ppo.temperature, ForbiddenTokens((40, 41), 1)
    )
    rows = rows if scored else replace(rows, old_logprobs=None)
    by_run = loss(rows, MINIBATCH, 0.01, MetricSums())
    of_text = 0.01 * actor.module(GOOD_SFT.input_ids, GOOD_SFT.loss_mask)[0].sum()
    main(
        [
            bundle(
                assets,
                tmp_path,
                "ppo",
                "actor",
                actor,
                [rows, GOOD_SFT],
                ACTOR | {"forbidden_tokens": ((40, 41), 1)},
            )
        ]
    )
    assert losses_said(capsys.readouterr().out) == pytest.approx(
        [by_run.item(), of_text.item()], rel=1e-5
    )
    # where the clip of values makes a difference
    rows = replace(rows, values=torch.full((3, 2), 5.0))
    if not scored:
        made = vars(replace(rows, values=None, rewards=2.0 * rows.response_mask))
        rows = RewardedRollout(
            **{name: made[name] for name in RewardedRollout.__dataclass_fields__}
        )
    by_run = critic_loss(critic.module, rows, MINIBATCH, config.algorithm, MetricSums())
    main([bundle(assets, tmp_path, "ppo", "critic", critic, [rows], CONSTANTS)])
    assert losses_said(capsys.readouterr().out) == pytest.approx([by_run.item()], rel=1e-5)


def test_the_model_uses_the_kernels_and_the_attention_of_the_run(
    assets, tmp_path, capsys, monkeypatch
):
    engine = engine_of("policy")
    engine.module.layout, used = Layout(fused=False, packed=True, shares=True), []
    monkeypatch.setattr("dschat_ppo.features.replay.replayed_step.set_random_state", lambda _: None)
    monkeypatch.setattr(
        "dschat_ppo.features.replay.replayed_step.loss_function",
        lambda _, __, model: used.append(model.layout),
    )
    eager, sdpa = (
        bundle(
            assets,
            tmp_path / choice,
            "sft",
            "model",
            engine,
            [GOOD_SFT],
            {"total": 7.0},
            ("--attn_implementation", choice),
        )
        for choice in ("eager", "sdpa")
    )
    assert main([eager]) == main([sdpa, "--dtype", "bf16"]) == 2, "there is no loss here"
    assert used == [replace(engine.module.layout, attention=choice) for choice in ("eager", "auto")]


def test_an_infinite_loss_with_finite_gradients_counts(assets, tmp_path, capsys):
    """A reference of -inf on one side: log sigmoid(-inf) has the value -inf and the slope 1."""
    batch = replace(DPO, ref_logprobs=torch.tensor([math.inf, 0.0, 0.0, 0.0], dtype=torch.float64))
    words = ("--objective", "dpo")
    assert (
        main(
            [
                bundle(
                    assets,
                    tmp_path,
                    "reward",
                    "model",
                    engine_of("policy"),
                    [batch],
                    {"total": 2.0},
                    words,
                )
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "micro-batch 0: loss inf" in said and "ref_logprobs is not finite in 1 of its rows" in said
    )
    assert "gradients that are not finite" not in said


def test_another_number_format_reproduces_an_overflow(assets, tmp_path, capsys):
    """Weights that overflow fp16's 65504 in a product, and nothing else."""
    engine = engine_of("policy")
    with torch.no_grad():
        engine.module.lm.model.layers[0].mlp.up_proj.weight.fill_(3e4)
        engine.module.lm.model.layers[0].mlp.gate_proj.weight.fill_(1.0)
        engine.module.lm.model.layers[0].mlp.down_proj.weight.fill_(1e-6)
    folder = bundle(assets, tmp_path, "sft", "model", engine, [GOOD_SFT], {"total": 7.0})
    assert main([folder]) == 1
    assert main([folder, "--dtype", "fp16"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"first output that is not finite: lm\.model\.layers\.0\.mlp\.", said)
    assert "replayed in fp16" in said


def test_a_bundle_with_changed_values_is_one_line(assets, tmp_path, capsys):
    step, role, kind, records, constants, words = CASES["sft"]
    file = (
        Path(bundle(assets, tmp_path, step, role, engine_of(kind), records, constants, words))
        / "bundle.pt"
    )
    for change in (
        {"random_state": None},
        {"constants": {}},
        {"records": [["X", {}]]},
        {"layout": 3},
    ):
        whole = load_state(file)
        save_state(file, whole | change)
        assert main([str(file.parent)]) == 2
        said = capsys.readouterr().err.splitlines()
        assert (
            said[-1].startswith(f"error: {file.parent}: cannot be replayed: ")
            and "Traceback" not in said
        )
        save_state(file, whole)
    assert (
        main([str(tmp_path)]) == 2 and "is not a complete repro bundle" in capsys.readouterr().err
    )


def test_gradients_are_scaled_by_ranks_and_loss_scale(assets, tmp_path, capsys):
    folder = Path(
        bundle(assets, tmp_path, "sft", "model", engine_of("policy"), [GOOD_SFT], {"total": 7.0})
    )
    main([str(folder)])
    save_state(
        folder / "bundle.pt",
        load_state(folder / "bundle.pt") | {"world_size": 2, "loss_scale": {"fp32": 8.0}},
    )
    for words in ([], ["--dtype", "fp32"], ["--dtype", "bf16"]):
        main([str(folder), *words])
    norms = [
        float(found)
        for found in re.findall(r"norm of this rank's gradients: (\S+)", capsys.readouterr().out)
    ]
    alone, same, same_again, other_format = norms
    assert [same, same_again] == pytest.approx([16 * alone] * 2)
    assert other_format == pytest.approx(2 * alone, rel=0.02), (
        "a loss scale is of one number format"
    )


def test_the_first_bad_output_is_named_with_the_state_of_its_inputs():
    class Pieces(nn.Module):
        def forward(self, x):
            return {
                "a": (torch.ones(1), [x.log()]),
                "b": None,
                "c": torch.ones(1, dtype=torch.long),
            }

    model, found = nn.Sequential(nn.ReLU(), Pieces()), []
    for inputs in ((2.0, 0.0, math.nan), (math.nan, 0.0)):  # the first one is kept
        with first_bad_output(model) as outputs:
            for number in inputs:
                model(torch.tensor([number]))
        found += outputs
    assert found == ["1 (Pieces; its inputs are finite)", "0 (ReLU; so are its inputs)"]
