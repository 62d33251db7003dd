"""Plain text in micro-batches of an optimizer step."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from dschat_ppo.common import dist
from dschat_ppo.features.ptx import further_data
from dschat_ppo.features.ptx.flags import PtxFlags
from dschat_ppo.features.ptx.further_data import TextBatches, prepare_data


def test_ranks_share_the_next_blocks_and_divide_by_the_tokens_of_all(monkeypatch):
    lengths = (3, 2, 5, 4, 2, 3, 4)
    # the first token of a block is not predicted
    answers = [[[9] * (length - 1)] for length in lengths]
    blocks = Dataset.from_dict({"prompt_ids": [[row] for row in range(7)], "answers": answers})

    def texts(micro_batch=2) -> TextBatches:
        return TextBatches(blocks, 4, micro_batch, 3, 0, torch.device("cpu"))

    def tokens_of(rows) -> int:
        return sum(lengths[row] - 1 for row in rows)

    served, order = texts(), texts().stream
    for _ in range(3):
        batches, tokens = served.take()
        expected = order.take(4)
        assert [batch.input_ids[:, 0].tolist() for batch in batches] == [expected[:2], expected[2:]]
        assert [int(batch.loss_mask.sum()) for batch in batches] == [
            tokens_of(expected[:2]),
            tokens_of(expected[2:]),
        ]
        assert float(tokens) == tokens_of(expected)
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda count: count + 100)
    expected, found = texts().stream.take(4), []
    for rank, micro_batch in ((0, 1), (1, 2)):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        batches, tokens = texts(micro_batch).take()
        own = [row for batch in batches for row in batch.input_ids[:, 0].tolist()]
        assert len(batches) == 2 // micro_batch and float(tokens) == 100 + tokens_of(own)
        found += own
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(("tokens", "rows"), [(9, 1), (39, 3), (1000, 8)])
def test_a_micro_batch_of_texts_has_no_more_tokens_or_rows_than_one_of_answers(
    tokens, rows, monkeypatch
):
    config = SimpleNamespace(
        of=lambda kind: PtxFlags(unsupervised_dataset_name="texts"),
        ppo=SimpleNamespace(max_prompt_seq_len=6, max_answer_seq_len=4),
        data=None,
        run=SimpleNamespace(seed=0),
    )
    plan = SimpleNamespace(
        flags=SimpleNamespace(per_device_training_batch_size=8),
        micro_batch_tokens=tokens,
        global_batch=8,
    )
    tokenizer, blocks = (
        SimpleNamespace(pad_token_id=0),
        Dataset.from_dict({"prompt_ids": [[1]], "answers": [[[2]]]}),
    )
    monkeypatch.setattr(
        further_data, "text_blocks", lambda name, part, tokenizer, length, data: blocks
    )
    prepared = prepare_data(config, plan, tokenizer, torch.device("cpu"))
    assert prepared.batches.micro_batch == rows and prepared.rows is blocks
