"""TensorBoard files, read back by TensorBoard."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from dschat_ppo.monitor.trackers import Answer, Start, TensorBoardTracker, Tracking


def tracking_in(folder) -> Tracking:
    flags = {"learning_rate": 0.5, "seed": 3, "dtype": "bf16", "packing": True, "config": None, "data_path": ["a", "b"]}
    return Tracking(("tensorboard",), folder, folder / "board", None, None, flags)


def read(folder) -> EventAccumulator:
    return EventAccumulator(str(folder / "board"), STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def plugin_content(board, tag) -> plugin_data_pb2.HParamsPluginData:
    content = board.summary_metadata[tag].plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content)


def test_scalars_texts_and_flags_are_read_back(tmp_path):
    tracker = TensorBoardTracker(tracking_in(tmp_path), Start())
    answers = [Answer("1 + 1\n= |?", "*2*\n", 0.25, 3)]
    tracker.write(7, {"reward/score_mean": 1.5, "kl/ref_k1": -0.25}, answers)
    tracker.close(succeeded=True)
    board = read(tmp_path)
    assert [(event.step, event.value) for event in board.Scalars("reward/score_mean")] == [(7, 1.5)]
    [event] = board.Tensors("samples/answers/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 7
    assert text == "**score 0.25**, 3 tokens\n\nprompt:\n\n    1 + 1\n    = |?\n\nanswer:\n\n    *2*"


def test_flags_and_the_end_of_the_run_are_in_the_hparams_tab(tmp_path):
    tracker = TensorBoardTracker(tracking_in(tmp_path), Start())
    begun = plugin_content(read(tmp_path), "_hparams_/session_start_info").session_start_info.hparams
    assert (begun["learning_rate"].number_value, begun["seed"].number_value) == (0.5, 3)
    assert (begun["dtype"].string_value, begun["packing"].string_value) == ("bf16", "True")
    assert (begun["config"].string_value, begun["data_path"].string_value) == ("None", "['a', 'b']")
    tracker.close(succeeded=True)
    assert "_hparams_/session_end_info" in read(tmp_path).summary_metadata


def test_a_failed_run_is_not_marked_as_ended(tmp_path):
    TensorBoardTracker(tracking_in(tmp_path), Start()).close(succeeded=False)
    assert "_hparams_/session_end_info" not in read(tmp_path).summary_metadata


def test_the_hparams_tab_finds_all_flags_and_the_final_metrics(tmp_path):
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams.backend_context import Context
    from tensorboard.plugins.hparams.list_session_groups import Handler

    tracker = TensorBoardTracker(tracking_in(tmp_path), Start())
    for step in (1, 2):
        tracker.write(step, {"train/loss": 3.0 / step}, ())
    tracker.close(succeeded=True)
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    context, request = Context(TBContext(data_provider=provider)), RequestContext()
    content = context.hparams_metadata(request, "")
    found = context.experiment_from_metadata(request, "", True, content, [])
    assert {info.name for info in found.hparam_infos} >= {"learning_rate", "seed", "dtype", "packing"}
    [metric] = found.metric_infos
    assert metric.name.tag == "train/loss"
    wanted = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[api_pb2.STATUS_SUCCESS], aggregation_type=api_pb2.AGGREGATION_AVG, slice_size=9,
        col_params=[api_pb2.ColParams(metric=metric.name)], include_metrics=True,
    )  # fmt: skip
    [group] = Handler(request, context, "", wanted).run().session_groups
    [session] = group.sessions
    assert session.metric_values[0].value == pytest.approx(1.5) and session.metric_values[0].training_step == 2


def test_points_of_steps_that_run_again_are_dropped(tmp_path):
    for start, steps in ((Start(), (1, 2, 3)), (Start(2, 3), (2, 3, 4))):
        tracker = TensorBoardTracker(tracking_in(tmp_path), start)
        for step in steps:
            tracker.write(step, {"a": float(steps[0])}, ())
        tracker.close(succeeded=True)
    assert [(event.step, event.value) for event in read(tmp_path).Scalars("a")] == [(1, 1), (2, 2), (3, 2), (4, 2)]
