"""Step 3 before its models are loaded: checks of flags, reward sources and model folders; prompts;
the batch plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.identity import EVAL_ROWS, RunInputs
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.own_functions import own_files
from dschat_ppo.common.phases import announce
from dschat_ppo.config.batch_plan import PPOPlan, plan_ppo
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.data.further_data import FurtherData, prepare_further_data
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.data.prompt_contents import prompt_content
from dschat_ppo.data.templates import with_template_flags
from dschat_ppo.engine.ds_config import check_zero_plus_plus, require_agreement
from dschat_ppo.engine.rlhf_engine import ModelFolders
from dschat_ppo.errors import UserError, counted
from dschat_ppo.features import hooks
from dschat_ppo.models.kernel_selection import check_attention
from dschat_ppo.models.loading import (
    changes_to_train,
    check_sequence_classifier,
    frozen_changes,
    load_config,
    require_length,
)
from dschat_ppo.models.model_folders import model_folder, with_bases
from dschat_ppo.models.tokenizers import load_tokenizer, read_tokenizer
from dschat_ppo.models.vocabulary import check_vocabulary
from dschat_ppo.monitor.early_stop import warn_of_few_evaluations
from dschat_ppo.ppo.components import PPOData
from dschat_ppo.ppo.generation_settings import check_stop_ids
from dschat_ppo.ppo.own_algorithms import check_own_functions
from dschat_ppo.ppo.rollouts import described_tools
from dschat_ppo.rewards.build_rewards import (
    CheckedFunction,
    check_columns,
    check_routes,
    check_sandbox,
    check_sources,
    checked_services,
    further_routes,
)
from dschat_ppo.rewards.function_reward import FunctionReward, function_files, parse_function
from dschat_ppo.rewards.learned_reward import saved_statistics, token_scoring
from dschat_ppo.run.run_models import (
    PromptReader,
    check_further_models,
    check_language_model,
    check_prompt_readers,
    check_same_tokens,
    data_of_model,
    further_readers,
)
from dschat_ppo.run.session import Session, begin_run, end_dry_run, naming, open_session
from dschat_ppo.run.start_and_end import log_samples, show_plan

ACTOR = "--actor_model_name_or_path"
REFERENCE = "--ref_model_name_or_path"
LIMITS = "--max_prompt_seq_len + --max_answer_seq_len"


def local_model_folders(config: PPOConfig) -> ModelFolders:
    """Local folders of the models; hub names are downloaded."""
    local = {role: model_folder(name, flag) for role, (flag, name) in config.models.items()}
    actor = local["actor"]
    reference = local.get("reference")
    if reference is not None and Path(reference).resolve() == Path(actor).resolve():
        reference = None
    further = {model.role: local[model.role] for model in config.further_models}
    return ModelFolders(actor, local.get("critic"), local.get("reward"), reference, further)


def check_models(
    config: PPOConfig, folders: ModelFolders, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that the folders hold models that their roles can use; no weights are read.
    `tokenizer` is the actor's, whose token ids the others read; only a reward model may have its
    own. `UserError` names the flag and the folder."""
    longest = config.ppo.max_prompt_seq_len + config.ppo.max_answer_seq_len
    changes = changes_to_train(config, "actor_")
    actor_config = check_language_model(
        config, ACTOR, folders.actor, tokenizer, longest, LIMITS, changes
    )
    for check_trained_model in hooks("checks.check_trained_model"):
        check_trained_model(config, actor_config, f"{ACTOR} {folders.actor}")
    if folders.reference is not None:
        frozen = frozen_changes(config)
        check_same_tokens(config, REFERENCE, folders.reference, tokenizer, longest, LIMITS, frozen)
    check_further_models(config, folders.further, tokenizer, longest, LIMITS)
    if folders.critic is not None:
        flag, _ = config.models["critic"]
        changes = changes_to_train(config, "critic_")
        with naming(flag):
            check_sequence_classifier(folders.critic, config.critic_may_have_new_head, changes)
        if folders.critic != folders.actor:  # else it is checked above
            critic_config = load_config(folders.critic, flag)
            resize = config.run.resize_vocabulary
            check_vocabulary(tokenizer, critic_config, flag, folders.critic, True, resize)
            require_length(folders.critic, longest, LIMITS)
        check_attention(config, flag, folders.critic, scalar=True, kinds=changes.kinds)
    if folders.reward is not None:
        _check_reward_model(config, folders.reward, tokenizer, longest)
    for check_folders in hooks("checks.check_folders"):
        check_folders(config, folders)


def _check_reward_model(
    config: PPOConfig, folder: str, tokenizer: PreTrainedTokenizerBase, longest: int
) -> None:
    """Check that the folder holds a reward model that can score what the actor writes with
    `tokenizer`. `longest`: tokens of a prompt and its response."""
    flag, _ = config.models["reward"]
    changes = frozen_changes(config)
    with naming(flag):
        check_sequence_classifier(folder, new_head=False, changes=changes)
    check_attention(config, flag, folder, scalar=True, kinds=changes.kinds)
    model_config = load_config(folder, flag)
    if config.algorithm.normalize_rewards == "model":
        saved_statistics(model_config, folder)
    separate_tokenizer = reward_tokenizer(config, folder, tokenizer)
    token_scoring(config, model_config, folder, separate_tokenizer or tokenizer)
    check_vocabulary(
        separate_tokenizer or tokenizer,
        model_config,
        flag,
        folder,
        resize=config.run.resize_vocabulary,
    )
    if separate_tokenizer is not None:
        return
    if read_tokenizer(folder, flag).chat_template != tokenizer.chat_template:
        logger().warning(
            f"{flag} {folder}: its chat template differs from the actor's, but it reads the actor's"
            " token ids, rendered with the actor's template; for chat messages, train both with"
            " the same template (--chat_template)"
        )
    require_length(folder, longest, LIMITS)


def reward_tokenizer(
    config: PPOConfig, folder: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The reward model's tokenizer if its vocabulary differs from the actor's; else None."""
    flag, _ = config.models["reward"]
    saved_tokenizer = read_tokenizer(folder, flag)
    if saved_tokenizer.get_vocab() == tokenizer.get_vocab():
        return None
    return saved_tokenizer


@dataclass(frozen=True)
class BegunPPO:
    """A run of step 3 before its models are loaded from `folders`."""

    output: Path
    folders: ModelFolders
    data: PPOData
    plan: PPOPlan
    session: Session | None  # None: --validate_only, --measure
    started: float  # `time.perf_counter()` after the data are prepared


@dataclass
class CheckedFunctions:
    """The reward functions of the user, once `check` has tried them."""

    of_training: list[CheckedFunction] = field(default_factory=list)
    of_evaluation: list[CheckedFunction] = field(default_factory=list)

    def check(self, config: PPOConfig) -> None:
        """Try every function of the user: reward functions, estimator, policy loss, metrics and
        sampler."""
        clipping = "scores not clipped"
        if config.score_clip:
            clipping = f"scores clipped to +- {config.score_clip:g}"
        logger().info(
            f"step 3: --advantage_estimator {config.algorithm.advantage_estimator}, --policy_loss"
            f" {config.algorithm.policy_loss}, {clipping}"
        )
        check_own_functions(config)
        checked_services(config)  # fails here if one cannot be asked
        self.of_training = check_sources(config.rewards)
        if config.validation.eval_reward_function:
            reward = evaluation_reward(config)  # fails here if it cannot be used
            reward.close()
            check_sandbox(config.rewards, [reward.spec])
            self.of_evaluation = [(reward.spec, reward.signature)]


def begin_ppo(config: PPOConfig) -> BegunPPO:
    """Do everything that comes before the models are loaded: check flags, functions and models,
    prepare the data, plan the batches, and find the checkpoint. Collective.

    Raises:
        StopRequested: the run was asked to stop, or is already complete.
    """
    functions = CheckedFunctions()
    device, output = begin_run(config, partial(functions.check, config))
    require_agreement(config, dist.world_size())
    check_zero_plus_plus(config.memory, dist.world_size())
    folders = local_model_folders(config)
    tokenizer = with_template_flags(load_tokenizer(folders.actor, ACTOR), config.data)
    check_models(config, folders, tokenizer)
    check_stop_ids(config.ppo.stop_token_ids, tokenizer)

    announce("prepare data")
    rows = _tokenised_prompts(config, folders.actor, tokenizer)
    _check_use_of_rows(config, functions, folders, rows, tokenizer)
    plan = plan_ppo(
        config.ppo,
        len(rows.train),
        dist.world_size(),
        config.algorithm.critic_warmup_rollouts,
        config.ranks_of_row,
        config.schedule.max_steps,
        dist.on_gpu(),
    )
    further_data = prepare_further_data(config, plan, tokenizer, device)
    planned_steps = None
    if not config.validate_only:
        show_ppo_batches(config, plan)
        planned_steps = plan.ppo_steps
        if config.schedule.early_stop_patience is not None:
            evaluations = (plan.ppo_steps - 1) // config.validation.eval_interval
            warn_of_few_evaluations(config.schedule.early_stop_patience, evaluations)
    end_dry_run(config.run, config.safety.resume, planned_steps)
    started = time.perf_counter()
    session = None
    if not config.validate_only and not config.run.measure:
        session = open_session(
            output,
            config,
            inputs_of(config, folders, rows, further_data),
            derived_batch_sizes(config, plan),
            plan.ppo_steps,
        )
    data = PPOData(rows, tokenizer, further_data)
    return BegunPPO(output, folders, data, plan, session, started)


def _tokenised_prompts(
    config: PPOConfig, folder: str, tokenizer: PreTrainedTokenizerBase
) -> TokenRows:
    """The prompts as tokens of the actor in `folder`; logs the first of them."""
    tools = described_tools(config, tokenizer, config.ppo.max_prompt_seq_len)
    data = data_of_model(config, folder, tokenizer)
    rows = prepare(replace(data, tools=tools), tokenizer)
    if config.validation.eval_data_path and rows.eval is None:
        raise UserError(
            "--eval_data_path: no prompt is within --max_prompt_seq_len; raise it or use"
            " --truncation left"
        )
    logged_rows = 1
    if config.run.dry_run:
        logged_rows = 3
    log_samples(tokenizer, rows.at_hand, rows.sources, logged_rows)
    return rows


def _check_use_of_rows(
    config: PPOConfig,
    functions: CheckedFunctions,
    folders: ModelFolders,
    rows: TokenRows,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Check that the routes of reward sources and of the models of features lead to prompts, that
    the data have the columns that reward functions and features take, and that the other models can
    read what the actor reads. A feature offers its check as `checks.check_rows(config, rows)`."""
    data_rows = rows.at_hand["row"]
    are_all_rows = len(rows.at_hand) == len(rows.train)
    routes = further_routes(config, config.further_models)
    check_routes(config.rewards, rows.sources, data_rows, are_all_rows, routes)
    further = prompt_content(rows.at_hand[0]).arguments
    if are_all_rows:
        check_columns(functions.of_training, "--data_path", data_rows, further)
        for check_rows in hooks("checks.check_rows"):
            check_rows(config, data_rows)
    if rows.eval is not None:
        of_evaluation = functions.of_evaluation or functions.of_training
        check_columns(of_evaluation, "--eval_data_path", rows.eval["row"], further)
        for check_rows in hooks("checks.check_rows"):
            check_rows(config, rows.eval["row"])
    prompts = [data for data in (rows.at_hand, rows.eval) if data is not None]
    check_prompt_readers(config, folders.actor, readers_of(config, folders), prompts, tokenizer)


def readers_of(config: PPOConfig, folders: ModelFolders) -> list[PromptReader]:
    """The models that read the prompts beside the actor."""
    readers = list[PromptReader]()
    for role in ("reward", "critic", "reference"):
        folder = vars(folders)[role]
        if folder is None:
            continue
        flag, _ = config.models[role]
        sources: Sequence[str] = ()
        if role == "reward":
            sources = config.rewards.reward_model_sources
        readers.append(PromptReader(role, flag, folder, sources))
    return readers + further_readers(config, folders.further)


def show_ppo_batches(config: PPOConfig, plan: PPOPlan) -> None:
    """Log batch sizes and warm-up."""
    totals = [plan.actor_updates]
    if config.algorithm.has_critic:
        totals.append(plan.total_updates)
    warmups = [(config.warmup_steps(total), total) for total in totals]
    show_plan("PPO: batches", plan.table(), *dict.fromkeys(warmups))
    if plan.warmup_rollouts < config.algorithm.critic_warmup_rollouts:
        logger().info(
            f"note: --critic_warmup_rollouts is {plan.warmup_rollouts} in place of"
            f" {config.algorithm.critic_warmup_rollouts}, so that the last of"
            f" {counted(plan.ppo_steps, 'PPO step')} trains the actor"
        )


def derived_batch_sizes(config: PPOConfig, plan: PPOPlan) -> dict[str, int]:
    """Batch sizes that the flags result in, for a checkpoint's manifest. A feature adds what its
    results depend on, of `checkpoint.identity.DERIVED`, with `identity.derived_sizes(config,
    plan)`."""
    sizes = {"rows_per_update": plan.global_batch, "rows_per_step": plan.rollout_prompts}
    for derived_sizes in hooks("identity.derived_sizes"):
        sizes |= derived_sizes(config, plan)
    return sizes


def inputs_of(
    config: PPOConfig, folders: ModelFolders, rows: TokenRows, further_data: Sequence[FurtherData]
) -> RunInputs:
    """What a run of step 3 reads: models, rows, further data, and files of the user. Without
    --ref_model_name_or_path there is no entry for the reference, which is loaded from the actor's
    folder."""
    models = []
    for role, folder in vars(folders).items():
        if isinstance(folder, str):
            flag, _ = config.models[role]
            models.append((flag, folder))
    for model in config.further_models:
        models.append((model.label, folders.further[model.role]))
    evaluation_functions = []
    if config.validation.eval_reward_function:
        evaluation_functions = [config.validation.eval_reward_function]
    files_of_features = []
    for files in hooks("flags.files"):  # (flag with its value, file) of each that a feature reads
        files_of_features += files(config)
    return RunInputs(
        rows.train,
        {EVAL_ROWS: rows.eval, **{data.rows_name: data.rows for data in further_data}},
        with_bases(models),
        [
            ("--deepspeed_config", config.run.deepspeed_config),
            *own_files(
                ("--advantage_estimator", config.algorithm.advantage_estimator),
                ("--policy_loss", config.algorithm.policy_loss),
                ("--sampler", config.ppo.sampler or ""),
            ),
            *files_of_features,
            *function_files("--reward_function", config.rewards.reward_function),
            *function_files("--eval_reward_function", evaluation_functions),
        ],
    )


def evaluation_reward(config: PPOConfig) -> FunctionReward:
    """The function of `--eval_reward_function`, which has no weight and no route."""
    rewards = config.rewards
    text = config.validation.eval_reward_function or ""
    spec = parse_function(text, "--eval_reward_function")
    if spec.weight != 1 or spec.sources:
        raise UserError(
            f"{spec.flag} {text}: it alone scores the evaluation, so it takes no weight and no"
            " route"
        )
    return FunctionReward(spec, rewards.reward_workers, rewards.reward_timeout)
