import pytest
from builders import measurement, trial_config

from pipetune.core.record import TrialRecord
from pipetune.core.study import Budget
from pipetune.search.budget import CERTIFICATION_SHARE, Spending
from pipetune.search.certify import ROUNDS


class Clock:
    def __init__(self):
        self.now_s = 500.0

    def __call__(self):
        return self.now_s


def spending(*, seconds=None, trials=None, spent_before_s=0.0):
    clock = Clock()
    budget = Budget(seconds=seconds, trials=trials)
    return Spending(budget, spent_before_s=spent_before_s, clock=clock), clock


def records(*seconds):
    config = trial_config()
    return [
        TrialRecord(number=number, config=config, outcome=measurement(config), seconds=took)
        for number, took in enumerate(seconds)
    ]


def test_time_runs_from_what_earlier_runs_spent():
    spent, clock = spending(seconds=60.0, spent_before_s=20.0)
    clock.now_s += 5.0
    assert spent.seconds() == pytest.approx(25.0)
    assert spent.seconds_left() == pytest.approx(35.0)


def test_time_left_is_never_negative():
    spent, clock = spending(seconds=60.0)
    clock.now_s += 1000.0
    assert spent.seconds_left() == 0.0


def test_a_budget_of_trials_has_no_time_left_to_tell():
    assert spending(trials=5)[0].seconds_left() is None


@pytest.mark.parametrize(("done", "allowed"), [(0, True), (2, True), (3, False), (4, False)])
def test_trials_are_counted(done, allowed):
    assert spending(trials=3)[0].allows_trial(records(*[7.0] * done), []) is allowed


def test_the_first_trial_is_allowed_in_any_time():
    assert spending(seconds=1.0)[0].allows_trial([], [])


def test_time_for_certification_is_kept_back():
    # GIVEN a leader and a baseline of 9 and 11 s, and 2 s to set up a fresh process
    spent, clock = spending(seconds=200.0)
    spent.set_up_s = 2.0
    done = records(9.0, 10.0, 11.0)
    reserve_s = (ROUNDS - 1) * (9.0 + 2.0 + 11.0 + 2.0)
    # THEN a trial is allowed while it and the certification fit, and not a second longer
    clock.now_s += 200.0 - reserve_s - 10.0 - 1.0
    assert spent.allows_trial(done, [9.0, 11.0])
    clock.now_s += 2.0
    assert not spent.allows_trial(done, [9.0, 11.0])


def test_certification_keeps_back_no_more_than_its_share():
    spent, clock = spending(seconds=60.0)
    spent.set_up_s = 1000.0
    clock.now_s += 60.0 * CERTIFICATION_SHARE - 11.0
    assert spent.allows_trial(records(10.0), [10.0])
    clock.now_s += 2.0
    assert not spent.allows_trial(records(10.0), [10.0])


@pytest.mark.parametrize(
    ("left_s", "arms"),
    [
        (200.0, 4),  # 4 arms of 10 s, two rounds
        (80.0, 4),
        (79.0, 3),
        (59.0, 2),
        (0.0, 2),  # the leader and the baseline are always certified
    ],
)
def test_as_many_finalists_as_fit_are_certified(left_s, arms):
    spent, clock = spending(seconds=500.0)
    clock.now_s += 500.0 - left_s
    assert spent.affordable_arms([10.0, 10.0, 10.0, 10.0]) == arms


def test_the_baselines_own_cost_counts():
    spent, _ = spending(seconds=100.0)
    assert spent.affordable_arms([5.0, 5.0, 5.0, 60.0]) == 2
    assert spent.affordable_arms([5.0, 5.0, 5.0, 30.0]) == 4


@pytest.mark.parametrize("arms", [1, 2, 4])
def test_without_a_limit_of_time_all_finalists_are_certified(arms):
    assert spending(trials=5)[0].affordable_arms([1000.0] * arms) == arms


def test_a_baseline_alone_is_certified_however_dear():
    spent, _ = spending(seconds=1.0)
    assert spent.affordable_arms([1000.0]) == 1


def test_whichever_is_spent_first_ends_the_search():
    spent, clock = spending(seconds=60.0, trials=5)
    assert not spent.allows_trial(records(*[1.0] * 5), [])
    clock.now_s += 60.0
    assert not spent.allows_trial(records(1.0), [])


def test_two_rounds_are_always_made():
    spent, clock = spending(seconds=60.0)
    clock.now_s += 1000.0
    assert [spent.allows_round(done, 30.0) for done in range(ROUNDS + 1)] == [True, True, False, False]


def test_a_third_round_is_made_where_it_fits():
    spent, clock = spending(seconds=60.0)
    clock.now_s += 20.0
    assert spent.allows_round(2, 30.0)
    assert not spent.allows_round(2, 50.0)
    assert not spent.allows_round(ROUNDS, 1.0)
