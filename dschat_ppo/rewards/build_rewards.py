"""Check and build the reward sources that the flags name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dschat_ppo.common.logging import logger
from dschat_ppo.common.processes import deny_access_to_memory
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.config.feature_needs import FurtherModel
from dschat_ppo.config.ppo_flags import RewardSourceFlags
from dschat_ppo.data.examples import TRUTH
from dschat_ppo.errors import UserError
from dschat_ppo.features import hooks
from dschat_ppo.rewards.call_forms import Signature, missing_columns
from dschat_ppo.rewards.function_reward import FunctionReward, FunctionSpec, parse_function
from dschat_ppo.rewards.http_client import Service
from dschat_ppo.rewards.remote_reward import RemoteReward, remote_service
from dschat_ppo.rewards.reward_source import DATA_SOURCE, RewardMixture, RewardSource, is_routed_to
from dschat_ppo.rewards.sandbox import Limits, isolation
from dschat_ppo.types import Model

MOST_ROWS = 2000  # that `check_routes` reads
MOST_NAMED = 8  # data sources that a message lists


CheckedFunction = tuple[FunctionSpec, Signature]


def check_sources(flags: RewardSourceFlags) -> list[CheckedFunction]:
    """Check the reward sources before any model is loaded, and return the functions; warn about
    what the sandbox lacks. Each function is imported once in a worker process that ends again.
    Remote services are not contacted."""
    if flags.remote_urls:
        remote_service(flags.remote_urls, flags.remote_reward_timeout)
    specs = [parse_function(text) for text in flags.reward_function]
    functions = list[CheckedFunction]()
    for spec in specs:
        function = FunctionReward(spec, 1, flags.reward_timeout)
        function.close()
        functions.append((spec, function.signature))
        if spec.rule is None:
            description = function.signature.call.description
            if function.signature.knows_groups:
                description += ", with whole groups"
            logger().info(f"{spec}: {description}")
    check_sandbox(flags, specs)
    return functions


def checked_services(features: HasFeatures) -> list[Service]:
    """The addresses at which features score; `UserError` if one cannot be asked. A feature offers
    `reward_sources.services_of`."""
    services: list[Service] = []
    for services_of in hooks("reward_sources.services_of"):
        services += services_of(features)
    for service in services:
        service.check()
    return services


def further_routes(
    features: HasFeatures, models: Sequence[FurtherModel]
) -> list[tuple[str, Sequence[str]]]:
    """(flag, data sources) of the models and addresses of features, for `check_routes`."""
    routes = [(model.flag, model.sources) for model in models]
    routes += [(service.flag, service.sources) for service in checked_services(features)]
    return routes


def check_columns(
    functions: Sequence[CheckedFunction],
    flag: str,
    rows: Sequence[str],
    further: Collection[str] = (),
) -> None:
    """Check that the data have a column for each argument without a default. `rows`: all data rows
    that the functions score, as JSON, which `flag` names; `further`: arguments that features
    give."""
    for spec, signature in functions:
        missing = missing_columns(signature, further)
        if signature.form == "openrlhf":  # `labels` belong to the form, and may be None
            missing.discard("ground_truth")
        columns = dict[str, None]()
        for text in rows:
            if not missing:
                break
            row = json.loads(text)
            if not is_routed_to(spec.sources, row):
                continue
            columns |= dict.fromkeys(row)
            missing -= row.keys()
            if spec.rule is not None and TRUTH in row:
                missing.discard("answer")
        if missing and columns:
            columns_of_data = [name for name in columns if not name.startswith("_")]
            _refuse_missing(spec, flag, min(missing), columns_of_data)


def _refuse_missing(spec: FunctionSpec, flag: str, name: str, columns: Sequence[str]) -> NoReturn:
    """Refuse a function whose argument `name` has no column. A feature offers sentences about
    arguments that it knows as `reward_arguments.REFUSED`."""
    for sentences in hooks("reward_arguments.REFUSED"):
        if name in sentences:
            raise UserError(f"{spec}: {sentences[name]}")
    remedy = f"rename the argument, give it a default, or set it with ?{name}=VALUE"
    if spec.rule is not None:
        remedy = "give the rows this column"
    if name == "answer" and spec.rule is not None:
        remedy = "name the column of the correct answer with --answer_column"
    alias = {"answer": "ground_truth", "ground_truth": "answer"}.get(name)
    if alias in columns:
        remedy = f"--answer_column {alias} passes the column '{alias}' under both names"
    raise UserError(
        f"{spec}: no row of {flag} has a column '{name}' for its argument, which has no default;"
        f" the columns are: {', '.join(columns)}; {remedy}"
    )


def check_sandbox(flags: RewardSourceFlags, specs: Sequence[FunctionSpec]) -> None:
    """Check what the machine offers to isolate `code_tests`, if it is one of the functions, and its
    limits."""
    sandboxed = [spec for spec in specs if spec.rule == "code_tests"]
    if not sandboxed:
        return
    name = str(sandboxed[0])
    try:
        available = isolation()
    except RuntimeError as problem:
        raise UserError(f"{name}: the sandbox cannot start: {problem}") from None
    if not available.bwrap:
        if not flags.allow_weak_sandbox:
            raise UserError(
                f"{name}: {available.missing}. docs/rewards.md says what it needs (apt-get install"
                " bubblewrap, and the permission to create namespaces), or accept this with"
                " --allow_weak_sandbox"
            )
        deny_access_to_memory()
        logger().warning(f"{name}: {available.missing} (docs/rewards.md)")
    for spec in sandboxed:  # a program that uses up its time must score 0, not get the default
        wall = float(dict(spec.settings).get("wall_seconds", Limits.wall_seconds))
        if wall >= flags.reward_timeout:
            raise UserError(
                f"{spec}: wall_seconds={wall:g} must be below --reward_timeout"
                f" {flags.reward_timeout:g}, or a program that takes too long would get"
                " --reward_default"
            )


def check_routes(
    flags: RewardSourceFlags,
    names: Sequence[str],
    rows: Sequence[str],
    are_all_rows: bool = True,
    others: Sequence[tuple[str, Sequence[str]]] = (),
) -> None:
    """Check that each route of a reward source, and of `others` (flag, data sources), leads to
    prompts.

    `names`: of the data sets. `rows`: the data row of each prompt, as JSON; at most
    `MOST_ROWS`, evenly spaced, are read. A route without prompts is an error only if all rows were
    read and `are_all_rows` of the data, else a warning.
    """
    specs = map(parse_function, flags.reward_function)
    routes: list[tuple[str, Sequence[str]]] = [(str(spec), spec.sources) for spec in specs]
    if flags.use_reward_model:
        routes.append(("--reward_model_sources", flags.reward_model_sources))
    if flags.remote_urls:
        routes.append(("--remote_reward_sources", flags.remote_reward_sources))
    routes += others
    if not any(sources for _, sources in routes):
        return
    count = min(len(rows), MOST_ROWS)
    sources_of_data = set[str]()
    for index in range(count):
        row = json.loads(rows[index * len(rows) // count])
        sources_of_data.add(str(row.get(DATA_SOURCE)))
    listed = ", ".join(sorted(sources_of_data)[:MOST_NAMED])
    if len(sources_of_data) > MOST_NAMED:
        listed += ", ..."
    for flag, sources in routes:
        for source in sources:
            if source in sources_of_data:
                continue
            if are_all_rows and len(rows) <= MOST_ROWS:
                raise UserError(
                    f"{flag}: no prompt has the data source '{source}'; there are: {listed}"
                )
            if source not in names:
                logger().warning(
                    f"{flag}: none of {count} prompts has the data source '{source}', but: {listed}"
                )


def further_models(features: HasFeatures) -> list[FurtherModel]:
    """The models with which features score an evaluation. A feature offers
    `needs.models_of_evaluation`."""
    models: list[FurtherModel] = []
    for models_of_evaluation in hooks("needs.models_of_evaluation"):
        models += models_of_evaluation(features)
    return models


def sources_with_models(
    features: HasFeatures,
    frozen: Callable[[str], Model],
    folders: Mapping[str, str],
    batch_tokens: int,
    seed: int,
    trains: bool = True,
    output: Path | None = None,
) -> list[tuple[RewardSource, float]]:
    """The reward sources of features that score with models of the run, with their weights. A
    feature offers `reward_sources.sources_of` with these arguments.

    Args:
        features: the flags.
        frozen: role -> the model of that role, which does not train.
        folders: role -> local folder, of the models that features add.
        batch_tokens: most tokens of a forward pass.
        seed: of the run.
        trains: False for those of the held-out prompts of a run that trains, in place of its
            reward; () if there are none.
        output: the folder of a run that may be resumed; None: there is none.
    """
    sources: list[tuple[RewardSource, float]] = []
    for sources_of in hooks("reward_sources.sources_of"):
        sources += sources_of(features, frozen, folders, batch_tokens, seed, trains, output)
    return sources


def build_sources(
    flags: RewardSourceFlags,
    model_source: RewardSource | None,
    others: Sequence[tuple[RewardSource, float]] = (),
) -> RewardMixture:
    """All reward sources with their weights: the learned reward (`model_source`), functions, the
    remote service, and `others`. Starts the worker processes of the functions;
    `RewardMixture.close` ends them."""
    sources: list[tuple[RewardSource, float]] = []
    if model_source is not None:
        sources.append((model_source, flags.reward_model_weight))
    for spec in map(parse_function, flags.reward_function):
        function = FunctionReward(spec, flags.reward_workers, flags.reward_timeout)
        sources.append((function, spec.weight))
    if flags.remote_urls:
        remote = RemoteReward(
            flags.remote_urls, flags.remote_reward_timeout, sources=flags.remote_reward_sources
        )
        sources.append((remote, flags.remote_reward_weight))
    sources += others
    routes = {"model": flags.reward_model_sources, RemoteReward.name: flags.remote_reward_sources}
    return RewardMixture(sources, flags.default_score, routes)
