"""What ends a run early, what warns, and trackers: driven by plain numbers, without a model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.errors import EnvironmentProblem, GateStopped
from finetune.recipe.schema import Watch
from finetune.trainer.callbacks.early_stopping import EarlyStoppingCallback
from finetune.trainer.callbacks.spikes import DivergenceDetector, Limits, SpikeDetector, SpikesCallback
from finetune.trainer.callbacks.tracker import TrackerCallback

LIMITS = Limits(loss_spike=6.0, grad_norm_spike=10.0, divergence=1.0, divergence_steps=20)


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path / "checkpoints"), use_cpu=True)


class Records(list):
    def write(self, record: Any) -> None:
        self.append(dict(record))


def evaluate(callback: EarlyStoppingCallback, arguments: TrainingArguments, losses: list[float]) -> int | None:
    """The number of the evaluation, from 1, that ends the run."""
    for number, loss in enumerate(losses, start=1):
        control, state = TrainerControl(), TrainerState(global_step=10 * number)
        callback.on_evaluate(arguments, state, control, metrics={"eval_loss": loss})
        if control.should_training_stop:
            assert control.should_save
            return number
    return None


@pytest.mark.parametrize(
    ("patience", "min_improvement", "losses", "ends"),
    [
        (1, 0.0, [3.0, 2.0, 1.0], None),
        (1, 0.0, [3.0, 3.0], 2),
        (2, 0.0, [3.0, 1.0, 2.0, 0.9, 2.0, 1.5], 6),
        (2, 0.5, [3.0, 2.8, 2.4, 2.2, 2.0], 5),
        (2, 0.5, [3.0, 2.8, 2.6, 2.4], 3),
        (3, 0.5, [3.0, 2.8, 2.6, 2.4, 2.2, 2.0], None),
        (3, 0.0, [3.0, 4.0, 4.0], None),
    ],
    ids=[
        "falls",
        "equal is none",
        "count starts again",
        "too little is none",
        "two too little",
        "little by little",
        "not long enough",
    ],
)
def test_early_stopping_counts(
    arguments: TrainingArguments, patience: int, min_improvement: float, losses: list[float], ends: int | None
) -> None:
    callback = EarlyStoppingCallback(patience=patience, min_improvement=min_improvement)
    assert evaluate(callback, arguments, losses) == ends


def test_early_stopping_goes_on_counting_after_a_resume(arguments: TrainingArguments) -> None:
    past = [(0, 5.0), (10, 1.0), (20, 2.0), (20, 2.0)]  # the same weights looked at twice count once
    callback = EarlyStoppingCallback(patience=2, past=past)
    assert (callback.num_without_improvement, callback.is_over) == (1, False)
    control = TrainerControl()
    callback.on_evaluate(arguments, TrainerState(global_step=30), control, metrics={"eval_loss": 1.0})
    assert control.should_training_stop and callback.is_over


def test_a_spike_is_told_once() -> None:
    generator = random.Random(0)
    detector = SpikeDetector(6.0)
    assert all(detector.add(generator.gauss(2.0, 0.2)) is None for _ in range(200))
    assert detector.add(8.0) == pytest.approx(2.0, abs=0.2)
    assert detector.add(9.0) is None
    assert detector.add(2.0) is None
    assert detector.add(8.0) is not None


def test_falling_losses_and_equal_ones_are_no_spikes() -> None:
    for values in ([3.0 * 0.98**step for step in range(300)], [1.0] * 100, [1.0] * 50 + [1.25]):
        detector = SpikeDetector(6.0)
        assert [detector.add(value) for value in values] == [None] * len(values)


@pytest.mark.parametrize(
    ("losses", "is_diverged"),
    [
        ([1.2 - 0.01 * step for step in range(60)] + [7.0] * 20, True),
        ([1.2 - 0.01 * step for step in range(60)] + [7.0] * 19, False),
        ([1.2] * 60 + [7.0] * 19 + [1.2] + [7.0] * 19, False),
        ([1.2, 1.2, 1.2] + [7.0] * 20, True),
        ([1.2] * 30 + [1.2 + 0.05 * step for step in range(100)], True),
        ([11.0, 10.5, 10.0] * 20, False),
        ([0.3, 3.0] * 100, False),
    ],
    ids=["stays up", "not long enough", "came back", "at the start", "creeps up", "random weights", "mixed data"],
)
def test_divergence(losses: list[float], is_diverged: bool) -> None:
    detector = DivergenceDetector(1.0, 20)
    assert any(detector.add(loss) for loss in losses) == is_diverged


def stopped_at(losses: Iterable[float]) -> int | None:
    """The number of the loss, from 0, at which a run with the recipe's defaults is stopped."""
    detector = DivergenceDetector(LIMITS.divergence or 0.0, LIMITS.divergence_steps)
    return next((number for number, loss in enumerate(losses) if detector.add(loss)), None)


def test_the_defaults_are_those_tested() -> None:
    assert Limits(**Watch().model_dump()) == LIMITS


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 0.95])
def test_mixed_data_at_random_never_stops_a_run(share: float) -> None:
    """Easy and hard rows, one a step: twenty hard ones in a row are a matter of time."""
    for seed in range(20):
        generator = random.Random(f"{seed} {share}")
        assert stopped_at(3.0 if generator.random() < share else 0.3 for _ in range(10_000)) is None


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.3])
@pytest.mark.parametrize("ramp_steps", [1, 100, 500])
@pytest.mark.parametrize(("level", "plateau", "within"), [(2.5, 4.0, 300), (2.5, 6.5, 20), (1.2, 7.0, 20)])
def test_a_loss_that_climbs_to_a_plateau_is_caught(
    level: float, plateau: float, within: int, ramp_steps: int, noise: float
) -> None:
    for seed in range(10):
        generator = random.Random(seed)
        shares = (min(1.0, max(0.0, (step - 300) / ramp_steps)) for step in range(3000))
        stop = stopped_at(generator.gauss(level + (plateau - level) * share, noise) for share in shares)
        assert stop is not None and 300 < stop <= 300 + ramp_steps + within


def test_hard_and_easy_rows_that_explode_together_are_caught() -> None:
    for seed in range(20):
        generator = random.Random(seed)
        losses = [(3.0 if generator.random() < 0.7 else 0.3) + 5.0 * (step >= 500) for step in range(600)]
        assert stopped_at(losses) == 519


def log(callback: SpikesCallback, arguments: TrainingArguments, losses: list[float], *, first: int = 1) -> None:
    for step, loss in enumerate(losses, start=first):
        state = TrainerState(global_step=step)
        callback.on_log(arguments, state, TrainerControl(), logs={"loss": loss, "grad_norm": 0.5})


def test_a_diverged_run_is_stopped_and_its_spike_recorded(arguments: TrainingArguments) -> None:
    records, said = Records(), []
    callback = SpikesCallback(LIMITS, writer=records, say=said.append)
    with pytest.raises(GateStopped, match=r"diverged.*1\.2.*step 50") as caught:
        log(callback, arguments, [1.2] * 30 + [7.0] * 30)
    assert records == [{"kind": "spike", "step": 31, "of": "loss", "value": 7.0, "median": 1.2}]
    assert len(said) == 1 and "step 31" in said[0]
    assert "no checkpoint yet" in caught.value.remedy


def test_a_resumed_run_knows_the_level_it_had(arguments: TrainingArguments) -> None:
    past = [{"kind": "train", "step": step, "loss": 1.2 if step <= 30 else 7.0} for step in range(1, 41)]
    callback = SpikesCallback(LIMITS, writer=Records(), say=lambda text: None, past=past)
    log(callback, arguments, [7.0] * 9, first=41)
    with pytest.raises(GateStopped):
        log(callback, arguments, [7.0], first=50)


def test_what_is_off_is_not_watched(arguments: TrainingArguments) -> None:
    off = Limits(loss_spike=None, grad_norm_spike=None, divergence=None, divergence_steps=2)
    records = Records()
    log(SpikesCallback(off, writer=records, say=records.append), arguments, [1.2] * 30 + [7.0] * 60)
    assert records == []


class Failing(TrainerCallback):
    def __init__(self, *, fails_at: int, error: BaseException | None = None) -> None:
        self.num_calls = 0
        self._fails_at = fails_at
        self._error = error or ConnectionError("the server went away")

    def on_log(self, *arguments: Any, **kwargs: Any) -> None:
        self.num_calls += 1
        if self.num_calls == self._fails_at:
            raise self._error


def test_a_tracker_that_fails_later_is_left_out(arguments: TrainingArguments) -> None:
    said: list[str] = []
    inner = Failing(fails_at=2)
    tracker = TrackerCallback("wandb", inner, say=said.append)
    for _ in range(4):
        tracker.on_log(arguments, TrainerState(), TrainerControl(), logs={"loss": 1.0})
    assert inner.num_calls == 2
    assert said == ["the tracker wandb failed and gets nothing more of this run: ConnectionError: the server went away"]


def test_a_tracker_that_cannot_start_ends_the_run(arguments: TrainingArguments) -> None:
    tracker = TrackerCallback("wandb", Failing(fails_at=1), say=lambda text: None)
    with pytest.raises(EnvironmentProblem, match="wandb cannot start"):
        tracker.on_log(arguments, TrainerState(), TrainerControl(), logs={"loss": 1.0})


def test_a_tracker_that_leaves_the_process_is_one_that_fails(arguments: TrainingArguments) -> None:
    """Its SystemExit ended the run, with an exit code of its own."""
    said: list[str] = []
    given = (arguments, TrainerState(), TrainerControl())
    with pytest.raises(EnvironmentProblem, match="wandb cannot start: SystemExit: 3"):
        TrackerCallback("wandb", Failing(fails_at=1, error=SystemExit(3)), say=said.append).on_log(*given)
    tracker = TrackerCallback("wandb", Failing(fails_at=2, error=SystemExit(3)), say=said.append)
    for _ in range(3):
        tracker.on_log(*given, logs={"loss": 1.0})
    assert said == ["the tracker wandb failed and gets nothing more of this run: SystemExit: 3"]


def test_ctrl_c_inside_a_tracker_still_interrupts(arguments: TrainingArguments) -> None:
    tracker = TrackerCallback("wandb", Failing(fails_at=2, error=KeyboardInterrupt()), say=lambda text: None)
    tracker.on_log(arguments, TrainerState(), TrainerControl())
    with pytest.raises(KeyboardInterrupt):
        tracker.on_log(arguments, TrainerState(), TrainerControl())


class Session(TrainerCallback):
    """Notes the events of a tracker."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_begin(self, *arguments: Any, **kwargs: Any) -> None:
        self.events.append("begin")

    def on_log(self, *arguments: Any, logs: Any = None, **kwargs: Any) -> None:
        self.events.append("log")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        assert state.global_step == 4 and kwargs == {"model": "the model"}
        self.events.append("end")


def test_a_tracker_ends_when_it_is_closed_and_not_with_training(arguments: TrainingArguments) -> None:
    session = Session()
    tracker = TrackerCallback("wandb", session, say=lambda text: None)
    given = (arguments, TrainerState(global_step=4), TrainerControl())
    tracker.on_train_begin(*given, model="the model")
    tracker.on_train_end(*given, model="the model")
    tracker.on_log(*given, model="the model", logs={"eval_loss": 1.0})
    for _ in range(2):
        tracker.close()
    tracker.on_log(*given, model="the model", logs={"eval_loss": 1.0})
    assert session.events == ["begin", "log", "end"]


def test_a_tracker_that_was_never_begun_is_not_ended(arguments: TrainingArguments) -> None:
    session = Session()
    TrackerCallback("wandb", session, say=lambda text: None).close()
    assert session.events == []
