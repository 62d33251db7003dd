"""A reward model with its tokenizer: texts to scores."""

from __future__ import annotations

from collections.abc import Sequence

from dschat_ppo.common import dist
from dschat_ppo.common.logging import print_line
from dschat_ppo.data.batches import right_padded
from dschat_ppo.data.encode import encode_finished
from dschat_ppo.errors import UserError
from dschat_ppo.models.loading import check_vocabulary, load_config, load_sequence_classifier
from dschat_ppo.models.tokenizers import filler_id, load_tokenizer
from dschat_ppo.models.wrapped_models import ScalarModel
from dschat_ppo.rewards.learned_reward import SEPARATOR, most_tokens, scores_in_batches


class TextScorer:
    """A reward model that scores whole texts. `folder` holds a decoder with a one-label head named `score`, which is no
    process reward model, and its tokenizer. A forward pass has at most `max_batch_tokens`."""

    def __init__(self, folder: str, dtype: str, max_batch_tokens: int):
        config = load_config(folder, "--model")
        if SEPARATOR in config.to_dict():
            raise UserError(
                f"--model {folder}: is a process reward model (its config.json has {SEPARATOR}), but this server "
                "scores whole texts; give it to --reward_model_name_or_path of step 3, with --process_reward"
            )
        self.tokenizer = load_tokenizer(folder, "--model")
        check_vocabulary(self.tokenizer, config, "--model", folder)
        self.max_length = most_tokens(config)
        self.max_batch_tokens = max_batch_tokens
        self.device = dist.device()
        self.model = ScalarModel(load_sequence_classifier(folder, dtype, None, new_head=False)).to(self.device).eval()

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Score each text at the final token of `encode_finished`. Texts of more tokens than the model reads lose their
        start."""
        rows = [encode_finished(self.tokenizer, text) for text in texts]
        too_long = sum(len(row) > self.max_length for row in rows)
        if too_long:
            print_line(f"warning: {too_long} texts of more than {self.max_length} tokens; their start was cut off")
        input_ids, lengths = right_padded([row[-self.max_length :] for row in rows], filler_id(self.tokenizer))
        input_ids, lengths = input_ids.to(self.device), lengths.to(self.device)
        return scores_in_batches(self.model, input_ids, lengths, self.max_batch_tokens).tolist()
