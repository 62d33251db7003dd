"""TensorBoard files, read back by TensorBoard."""

from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

from dschat_ppo.monitor.trackers import Answer, Start, TensorBoardTracker, Tracking


def tracking_in(folder) -> Tracking:
    flags = {"learning_rate": 0.5, "seed": 3, "dtype": "bf16", "packing": True, "config": None, "data_path": ["a", "b"]}
    return Tracking(("tensorboard",), folder, folder / "board", None, None, flags)


def read(folder) -> EventAccumulator:
    return EventAccumulator(str(folder / "board"), STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


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
    [flags] = board.Tensors("flags/text_summary")
    assert "    learning_rate: 0.5\n    seed: 3\n" in flags.tensor_proto.string_val[0].decode()
    assert text == "**score 0.25**, 3 tokens\n\nprompt:\n\n    1 + 1\n    = |?\n\nanswer:\n\n    *2*"


def test_points_of_steps_that_run_again_are_dropped(tmp_path):
    for start, steps in ((Start(), (1, 2, 3)), (Start(2, 3), (2, 3, 4))):
        tracker = TensorBoardTracker(tracking_in(tmp_path), start)
        for step in steps:
            tracker.write(step, {"a": float(steps[0])}, ())
        tracker.close(succeeded=True)
    assert [(event.step, event.value) for event in read(tmp_path).Scalars("a")] == [(1, 1), (2, 2), (3, 2), (4, 2)]
