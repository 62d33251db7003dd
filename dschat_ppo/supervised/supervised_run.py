"""Steps 1 and 2 around the training loop: checks, data and session before it, saving after it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat_ppo.checkpoint.identity import EVAL_ROWS, RunInputs
from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import make_folder, write_file
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import announce
from dschat_ppo.config.supervised_config import FitConfig
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.data.prompt_contents import prompt_content, readable_prompts
from dschat_ppo.data.supervised_batches import plan_packing
from dschat_ppo.data.templates import with_template_flags
from dschat_ppo.engine.ds_config import Config, require_agreement
from dschat_ppo.errors import StorageError, UserError, counted
from dschat_ppo.features import hooks
from dschat_ppo.models.given_embeddings import GivenSource, given_sources_of
from dschat_ppo.models.kernel_selection import check_attention
from dschat_ppo.models.loading import (
    changes_to_train,
    check_sequence_classifier,
    load_config,
    require_length,
)
from dschat_ppo.models.model_folders import base_folder, model_folder, with_bases
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.vocabulary import check_vocabulary
from dschat_ppo.models.weight_headers import checkpoint_shapes
from dschat_ppo.monitor.early_stop import warn_of_few_evaluations
from dschat_ppo.monitor.writers import write_result
from dschat_ppo.nonfinite import NonFinitePolicy, recorders_of
from dschat_ppo.planner.step_time import fit_time
from dschat_ppo.run.output_folder import KeptModels, remove_checkpoints
from dschat_ppo.run.run_models import (
    check_further_models,
    check_language_model,
    check_prompt_readers,
    data_of_model,
    further_readers,
)
from dschat_ppo.run.session import (
    Session,
    begin_run,
    end_dry_run,
    end_measured_run,
    naming,
    open_session,
)
from dschat_ppo.run.start_and_end import (
    changes_of,
    log_samples,
    short_count,
    show_end,
    show_models,
    text_between,
    write_validation,
)
from dschat_ppo.supervised.measure_steps import measure_steps
from dschat_ppo.supervised.objective import score_rows
from dschat_ppo.supervised.trainer import SupervisedTrainer, fit_ds_config
from dschat_ppo.supervised.training_plan import plan_batches, show_supervised_batches
from dschat_ppo.types import Engine

MODEL = "--model_name_or_path"
LIMIT = "--max_seq_len"
SHOWN_ROWS = 8  # evaluation rows whose answers are written for the report
_SMALL_MODEL = 1e8  # parameters; smaller models take higher learning rates


@dataclass(frozen=True)
class SupervisedRun:
    """A run of step 1 or 2 before its model is loaded."""

    name: str  # in lines about its progress
    device: torch.device
    model_folder: str  # from which the model is loaded
    further_folders: Mapping[str, str]  # of the models that features add, by role
    tokenizer: PreTrainedTokenizerBase
    rows: TokenRows
    output: Path
    session: Session | None  # None: --validate_only, --measure
    ds_config: Config
    nonfinite: NonFinitePolicy
    config: FitConfig


def begin_supervised_run(config: FitConfig, name: str, title: str) -> SupervisedRun:
    """Do everything that comes before the model is loaded. `StopRequested` if the run was asked to
    stop, or is already complete. Collective. `name`: in lines about batches and progress; `title`:
    the first line of the log."""
    fit = config.fit
    device, output = begin_run(config)
    logger().info(title)
    folder = model_folder(fit.model_name_or_path, MODEL)
    tokenizer = with_template_flags(load_tokenizer(folder, MODEL), config.data)
    _check_model_of_step(config, folder, tokenizer)
    further_folders = {}
    for model in config.further_models:
        further_folders[model.role] = model_folder(model.name, model.flag)
    check_further_models(config, further_folders, tokenizer, fit.max_seq_len, LIMIT)
    require_agreement(config, dist.world_size())
    ds_config = fit_ds_config(config)
    announce("prepare data")
    rows = prepare(data_of_model(config, folder, tokenizer), tokenizer)
    _require_evaluation_rows(config, rows)
    used_rows = [data for data in (rows.at_hand, rows.eval) if data is not None]
    readers = further_readers(config, further_folders)
    check_prompt_readers(config, folder, readers, used_rows, tokenizer)
    report_learning_rate(config, folder)
    log_samples(tokenizer, rows.at_hand, rows.sources, 3 if config.run.dry_run else 1)
    packing = None
    if fit.packing:
        packing = plan_packing(rows.train, fit.max_seq_len)
    plan = plan_batches(fit, rows.train, packing, config.schedule.max_steps, config.ranks_of_row)
    # the first one has none before it
    evaluations = sum(plan.is_evaluated(step) for step in range(1, plan.total_steps)) - 1
    warn_of_few_evaluations(config.schedule.early_stop_patience, evaluations)
    session = None
    if fit.validate_only:
        end_dry_run(config.run, config.safety.resume, None)
    else:
        if config.run.dry_run:
            show_supervised_batches(name, plan, config)
        end_dry_run(config.run, config.safety.resume, plan.total_steps)
    if not fit.validate_only and not config.run.measure:
        models = [(MODEL, folder)]
        for model in config.further_models:
            models.append((model.label, further_folders[model.role]))
        overlay = ("--deepspeed_config", config.run.deepspeed_config)
        inputs = RunInputs(rows.train, {EVAL_ROWS: rows.eval}, with_bases(models), [overlay])
        batch_sizes = {"rows_per_update": plan.global_batch}
        session = open_session(output, config, inputs, batch_sizes, plan.total_steps)
    announce("load models")
    return SupervisedRun(
        name=name,
        device=device,
        model_folder=folder,
        further_folders=further_folders,
        tokenizer=tokenizer,
        rows=rows,
        output=output,
        session=session,
        ds_config=ds_config,
        nonfinite=NonFinitePolicy(config.safety, recorders_of(config, tokenizer)),
        config=config,
    )


def _check_model_of_step(
    config: FitConfig, folder: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that the model in `folder` can be trained by the flags: its kind, vocabulary and
    longest row, and what features need."""
    fit = config.fit
    changes = changes_to_train(config)
    if config.has_head:
        model_config = load_config(folder, MODEL)
        check_vocabulary(
            tokenizer, model_config, MODEL, folder, resize=config.run.resize_vocabulary
        )
        with naming(MODEL):
            check_sequence_classifier(folder, True, changes)
        require_length(folder, fit.max_seq_len, LIMIT)
        check_attention(config, MODEL, folder, scalar=True, kinds=changes.kinds)
    else:
        model_config = check_language_model(
            config, MODEL, folder, tokenizer, fit.max_seq_len, LIMIT, changes
        )
    for check_trained_model in hooks("checks.check_trained_model"):
        check_trained_model(config, model_config, f"{MODEL} {folder}")


def _require_evaluation_rows(config: FitConfig, rows: TokenRows) -> None:
    """Refuse flags that need evaluation rows where there are none."""
    metric = config.best.metric_for_best
    patience = config.schedule.early_stop_patience
    if config.fit.validate_only:
        flag = "--validate_only"
    elif metric is not None:
        flag = f"--metric_for_best {metric}"
    elif patience is not None:
        flag = f"--early_stop_patience {patience}"
    else:
        return
    if rows.eval is None:
        raise UserError(
            f"{flag}: there are no evaluation rows; give --eval_data_path, or an --eval_fraction"
            " above 0"
        )


def report_learning_rate(config: FitConfig, folder: str) -> None:
    """Warn of a learning rate above which training all weights ruins most pretrained models: 1e-4,
    and more for models of less than 100 M parameters, in inverse proportion to their number.
    `folder`: of the model."""
    fit = config.fit
    if fit.validate_only or config.is_frozen(""):
        return
    parameters = sum(
        math.prod(shape) for shape in checkpoint_shapes(base_folder(folder, MODEL)).values()
    )
    if fit.learning_rate > 1e-4 * max(1.0, _SMALL_MODEL / max(1, parameters)):
        logger().warning(
            f"--learning_rate {fit.learning_rate:g} trains whole weights: that ruins most"
            f" pretrained models of {short_count(parameters)} parameters; 1e-5 to 2e-5 is usual (a"
            " model that starts untrained takes more)"
        )


def given_sources_of_run(run: SupervisedRun) -> Mapping[str, GivenSource]:
    """`given_sources_of` the model that trains, as "model", and of those that features add."""
    folders = {"model": run.model_folder, **run.further_folders}
    dtype = run.config.run.dtype
    return given_sources_of(run.config, folders, dtype, run.tokenizer, run.device)


def train_and_save(
    trainer: SupervisedTrainer[Any],
    run: SupervisedRun,
    next_command: str,
    further: Mapping[str, Engine] | None = None,
) -> dict[str, Any]:
    """Train, resuming from the session's checkpoint if it has one; save the model, write
    `result.json` and return its content. Without a session, only evaluate. `further`: the models
    that features add, by role; they are shown beside the model."""
    output = run.output
    config = run.config
    session = run.session
    started = time.perf_counter()
    if config.run.measure:
        announce("measure")
        plan = trainer.plan
        accumulation = config.fit.gradient_accumulation_steps
        time_of_step = fit_time(measure_steps(trainer), accumulation, plan.total_steps)
        end_measured_run(config.run, str(time_of_step))
    if session is None:
        announce("evaluate")
        return write_validation(output, trainer.evaluate(), time.perf_counter() - started)
    roles = {"model": (trainer.engine, run.model_folder)}
    for role, engine in (further or {}).items():
        roles[role] = (engine, run.further_folders[role])
    show_models(roles, config.run.dtype, output)
    show_supervised_batches(run.name, trainer.plan, config)
    announce("train")

    kept_models = KeptModels(
        output,
        config.safety.save_hf_steps,
        keeps_best=config.best.metric_for_best is not None,
        save=lambda folder: trainer.save(folder, run.tokenizer),
    )
    with session.training(trainer) as (writer, checkpointer):
        trainer.health.begin(output)
        if trainer.steps == 0 and trainer.objective.score is not None:
            write_answers(trainer, run.tokenizer, output)
        trainer.run(writer, checkpointer, run.name, kept_models, session.trace)
        write_answers(trainer, run.tokenizer, output)
    announce("save models")
    result = trainer.save(output, run.tokenizer)
    result["seconds"] = round(time.perf_counter() - started, 2)
    write_result(output, result)
    if dist.is_main() and not config.safety.keep_final_checkpoint:
        remove_checkpoints(output)
    _show_training(run, result, next_command, is_resumed=session.checkpoint is not None)
    return result


def _show_training(
    run: SupervisedRun, result: Mapping[str, Any], next_command: str, is_resumed: bool
) -> None:
    """Log what `result.json` says about the training, and the next command."""
    names = {
        f"eval_{name}": f"evaluation {name}"
        for name in ("divergence", "loss", "perplexity", "accuracy", "margin")
    }
    steps = counted(int(result["optimizer_steps"]), "optimizer step")
    if "skipped_steps" in result:
        steps += f" ({result['skipped_steps']} more were skipped: NaN or infinity)"
    changes = changes_of(result, names)
    show_end(run.name, steps, result["seconds"], changes, [run.output], next_command, is_resumed)


def write_answers(
    trainer: SupervisedTrainer[Any], tokenizer: PreTrainedTokenizerBase, output: Path
) -> None:
    """Write the answers of the first evaluation rows, with their scores if the model gives any, to
    `eval/step_N.jsonl`, as step 3 writes its own. Without evaluation rows there is nothing to
    write. Collective, also its `StorageError`."""
    if trainer.rows.eval is None:
        return
    rows = trainer.rows.eval.select(range(min(SHOWN_ROWS, len(trainer.rows.eval))))
    scores = None
    if trainer.objective.score is not None:
        score = partial(trainer.objective.score, trainer.engine)
        # (rows, answers)
        scores = score_rows(trainer.engine, rows, score, SHOWN_ROWS, "samples").tolist()
    problem = None
    if dist.is_main():
        path = output / "eval" / f"step_{trainer.steps:06d}.jsonl"
        lines = [json.dumps(line) + "\n" for line in _lines_of_evaluation(rows, scores, tokenizer)]
        try:
            make_folder(path.parent)
            write_file(path, "".join(lines).encode())
        except OSError as raised:
            problem = (
                f"{path}: the answers of the evaluation rows cannot be written ({raised.strerror})"
            )
    problem = dist.broadcast_object(problem)
    if problem is not None:
        raise StorageError(problem)


def _lines_of_evaluation(
    rows: Dataset, scores: list[list[float]] | None, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """The prompt and the answers of each row as text, as step 3 writes those of samples."""
    for index, row in enumerate(rows):
        prompt_ids = row["prompt_ids"]
        texts = []
        for answer_ids in row["answers"]:
            texts.append(text_between(tokenizer, [*prompt_ids, *answer_ids], len(prompt_ids)))
        ended = ["data"] * len(texts)
        if len(texts) == 2:
            ended = ["chosen", "rejected"]
        content = prompt_content(row)
        [prompt] = readable_prompts(tokenizer, [prompt_ids], [content])
        line: dict[str, Any] = {
            "prompt": prompt,
            "answers": texts,
            "lengths": list(map(len, row["answers"])),
            "ended": ended,
        }
        if content.record:
            line["content"] = content.record
        if scores is not None:
            line["scores"] = scores[index]
        yield line
