"""The models of a run: checks before any of them is loaded."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.distillation_flags import TEACHER
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.data.templates import answer_ends
from dschat_ppo.errors import UserError
from dschat_ppo.models.adapters import AdapterSettings
from dschat_ppo.models.kernel_selection import check_attention
from dschat_ppo.models.loading import check_causal_lm, load_config, require_length
from dschat_ppo.models.tokenizers import read_tokenizer
from dschat_ppo.models.vocabulary import check_vocabulary
from dschat_ppo.run.session import naming


def check_language_model(
    config: StepConfig,
    flag: str,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    limits: str,
    adapter: AdapterSettings | None = None,
) -> PretrainedConfig:
    """Check that `folder`, which `flag` names, holds a language model that can read the tokenizer's
    ids in rows of up to `longest` tokens, a number that the flags `limits` set; returns its
    configuration."""
    model_config = load_config(folder, flag)
    check_vocabulary(tokenizer, model_config, flag, folder, resize=config.run.resize_vocabulary)
    with naming(flag):
        check_causal_lm(folder, adapter)
    require_length(folder, longest, limits)
    check_attention(config, flag, folder, scalar=False)
    return model_config


def check_same_tokens(
    config: StepConfig,
    flag: str,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    limits: str,
) -> None:
    """Check a reference or teacher, which reads the ids of the model that trains."""
    folder_tokenizer = read_tokenizer(folder, flag)
    if folder_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{flag} {folder}: its tokenizer differs from that of the model that trains, so it"
            " would read other text; use a model with the same tokenizer"
        )
    if flag == TEACHER:
        _warn_of_other_ends(f"{flag} {folder}", folder_tokenizer, tokenizer)
    check_language_model(config, flag, folder, tokenizer, longest, limits)


def _warn_of_other_ends(
    name: str, teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase
) -> None:
    """Warn if the responses of a teacher, `name`, end with other tokens than those of the model
    that trains."""
    teacher_ends = answer_ends(teacher)
    student_ends = answer_ends(student)
    if teacher_ends != student_ends:
        theirs = student.convert_ids_to_tokens(list(teacher_ends))
        ours = student.convert_ids_to_tokens(list(student_ends))
        logger().warning(
            f"{name}: ends its answers with {theirs}, but the model that trains with {ours}, so it"
            " learns to go on where it should end; use models with the same chat template and EOS"
        )
