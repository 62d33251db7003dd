"""Experience collection with stand-ins for generation and rewards, for tests."""

from types import SimpleNamespace

import torch
from datasets import Dataset
from tiny_experience import record

from dschat_ppo.common import stop_requests
from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import StopRequested
from dschat_ppo.models.backbone import Layout
from dschat_ppo.ppo.collect import ExperienceCollection
from dschat_ppo.ppo.rounds import rounds_of_run
from dschat_ppo.ppo.score import ForwardPasses
from dschat_ppo.rewards.reward_source import FailedRows, RewardServiceError, Scores
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import Rollout, ScoredRollout

CPU = torch.device("cpu")
WORDS = (
    "--actor_model_name_or_path a --critic_model_name_or_path c --data_path d --output_dir o"
    " --dtype fp32 "
)
WORDS += (
    "--advantage_estimator grpo --kl_coef 0 --old_logprobs rollout"
    " --per_device_generation_batch_size 4 "
)
WORDS += "--per_device_training_batch_size 4 --n_samples_per_prompt 2"


def clipped(scores):
    return scores.clamp(-5, 5)


def rows(groups: list[int], scores: list[float]) -> ScoredRollout:
    """Rows of one prompt and one response token; the token is the row's score times ten."""
    tokens = (torch.tensor(scores) * 10).long().unsqueeze(1)
    return record(
        ScoredRollout,
        torch.ones(len(groups), 1).bool(),
        response_ids=tokens,
        scores=torch.tensor(scores),
        groups=torch.tensor(groups),
        ref_logprobs=None,
        kl=None,
        values=None,
    )


class Sampler:
    """Answers of one token: 10 x the prompt's row number + the answer's number; remembers how it
    was asked."""

    config = GenerationConfig(SamplingParameters(), StoppingCriteria(1), samples=2)
    extensions = ()
    given_source = None

    def __init__(self):
        self.prompts = Dataset.from_dict(
            {"row": ["{}"] * 12, "source": [row % 3 for row in range(12)]}
        )
        self.asked = []

    def sample(
        self, indices, step, round_number=0, purpose="sampled", config=config, cancelled=never
    ):
        greedy = config.sampling.top_k == 1
        assert greedy is (purpose == "greedy")
        assert cancelled is (never if greedy else stop_requests.flag_is_set), (
            "a stop cancels sampling alone"
        )
        self.asked.append((list(indices), step, round_number, greedy))
        tokens = torch.tensor(
            [[10 * row + sample] for row in indices for sample in range(config.samples)]
        )
        ones = torch.ones_like(tokens)
        return Rollout(
            ones, ones.bool(), tokens, ones.bool(), -ones.float(), torch.full((len(tokens),), 2)
        )


class RewardRequests:
    """The score is the token; two answers fail in each rollout."""

    names = ["first", "second"]
    tokenizer = SimpleNamespace(
        batch_decode=lambda rows, skip_special_tokens: [str(row) for row in rows]
    )

    def __init__(self):
        self.failure, self.mixture, self.steps = None, self, []

    def request(self, rollout, indices, steps_done):
        self.steps.append(steps_done)
        return SimpleNamespace(indices=indices, step=steps_done)

    def __call__(self, request, rollout):
        if isinstance(self.failure, RewardServiceError):
            raise self.failure
        total = rollout.response_ids[:, 0].float()
        return Scores(total, torch.stack([total, -total], dim=1))

    def begin(self, request, rollout):
        return lambda: self(request, rollout)

    def count_failed_rows(self):
        if self.failure is not None:
            raise self.failure
        return FailedRows(faults=2, unscored=1)

    def take_metrics(self):
        return {}


class Stops:
    """A checkpointer that is asked to stop from its question `number` on."""

    def __init__(self, number=99):
        self.number, self.asked, self.saved = number, 0, 0

    def stop_requested(self):
        self.asked += 1
        return self.asked >= self.number

    def save_if_due(self):
        self.saved += 1
        if self.asked >= self.number:
            raise StopRequested("the state is saved")


def collection_of(
    words: str = "", several_data_sets: bool = False, old_logprobs="rollout"
) -> ExperienceCollection:
    config = parse("ppo", f"{WORDS} {words}".split())
    modes = []
    actor = SimpleNamespace(eval=lambda: modes.append("eval"), modes=modes, layout=Layout())
    plan = plan_ppo(config.ppo, 12, 1)
    passes = ForwardPasses(actor, None, None, 1.0, plan.micro_batch_tokens, old_logprobs, "k1")
    advantages = SimpleNamespace(
        scaled_and_clipped=clipped,
        source_weights=(),
        score_magnitudes=lambda rows: rows.scores.abs(),
    )
    rounds = rounds_of_run(config, plan, advantages)
    parts = config, plan, Sampler(), RewardRequests(), passes, rounds, PhaseClock()
    return ExperienceCollection(*parts, several_data_sets)


def collect(collection, step=1, checkpointer=None):
    """The body of `make_experience`, without the exchange between ranks."""
    checkpointer = checkpointer or Stops()
    with collection.cancelled_on_stop(checkpointer):
        rows = None
        while rows is None:
            prompts = collection.next_prompts()
            rollout = collection.sample(prompts, step, checkpointer)
            scores = collection.reward(rollout, prompts, step)
            rows = collection.add(collection.forward_passes(rollout, scores, prompts), step)
        return rows
