"""A reward function that hangs ends the run with an error that names it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from support.launch import SCRIPTS
from support.tiny import assert_same_weights, build_model, build_trainer, history, reward_even_tokens, train, weights
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer, reward_timeout


EVER = 3600


def sleeps(completions, **kwargs):
    time.sleep(EVER)


def waits_for_a_lock(completions, **kwargs):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def catches_everything(completions, **kwargs):
    while True:
        try:
            time.sleep(EVER)
        except Exception:
            pass


def sets_alarms_itself(completions, **kwargs):
    """As libraries that check answers do."""
    signal.signal(signal.SIGALRM, lambda *args: None)
    signal.alarm(1)
    signal.alarm(0)
    time.sleep(EVER)


async def awaits(completions, **kwargs):
    await asyncio.sleep(EVER)


class Judge:
    def __call__(self, completions, **kwargs):
        time.sleep(EVER)


@pytest.mark.parametrize(
    ("trainer_class", "function", "name"),
    [
        (KLXGRPOTrainer, sleeps, "sleeps"),
        (KLXGRPOTrainer, waits_for_a_lock, "waits_for_a_lock"),
        (KLXGRPOTrainer, catches_everything, "catches_everything"),
        (KLXGRPOTrainer, sets_alarms_itself, "sets_alarms_itself"),
        (KLXGRPOTrainer, awaits, "awaits"),
        (KLXGRPOTrainer, Judge(), "Judge"),
        (KLXRLOOTrainer, sleeps, "sleeps"),
        (KLXPPOTrainer, sleeps, "sleeps"),
    ],
)
def test_a_function_that_hangs_is_named(trainer_class, function, name, tmp_path):
    before = signal.getsignal(signal.SIGURG)
    rewards = [reward_even_tokens, reward_timeout(0.5)(function)]
    trainer = build_trainer(trainer_class, tmp_path, rewards=rewards, kl_penalty_coef=0.1)
    assert trainer.reward_func_names == ["reward_even_tokens", name]
    with pytest.raises(TimeoutError, match=f"The reward function '{name}' did not return within 0.5 seconds"):
        trainer.train()
    assert signal.getsignal(signal.SIGURG) is before


async def even_tokens(completion_ids, **kwargs):
    return reward_even_tokens(completion_ids)


@pytest.mark.parametrize("function", [reward_even_tokens, even_tokens])
def test_a_limit_changes_nothing_else(function, tmp_path):
    plain = train(KLXGRPOTrainer, tmp_path / "plain", rewards=function, kl_penalty_coef=0.1)
    limited = train(KLXGRPOTrainer, tmp_path / "limited", rewards=reward_timeout(60)(function), kl_penalty_coef=0.1)
    assert history(limited) == history(plain)
    assert_same_weights(weights(limited), weights(plain))


def test_errors_of_the_function_pass():
    @reward_timeout(60)
    def fails(completions):
        raise TimeoutError("the judge's own")

    with pytest.raises(TimeoutError, match="the judge's own"):
        fails([])


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), None, True, "60"])
def test_a_limit_is_a_positive_number(seconds):
    with pytest.raises(ValueError, match="positive number of seconds"):
        reward_timeout(seconds)


def test_only_functions_in_the_main_thread_can_be_limited():
    for model in (build_model(), "some/reward-model"):
        with pytest.raises(TypeError, match="A reward model needs no limit"):
            reward_timeout(60)(model)
    errors = []

    def call():
        try:
            reward_timeout(60)(sleeps)([])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "interrupted only in the main thread" in errors[0]


def test_a_process_that_cannot_be_interrupted_ends():
    code = """
import signal, time
from trl_klx.trainers import reward_timeout as module
module._AGAIN = module._GRACE = 0.2
@module.reward_timeout(0.2)
def deaf(completions):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
    time.sleep(3600)
deaf([])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "The reward function 'deaf' did not return within 0.2 seconds. It cannot be interrupted, so that the process "
        "ends.\n"
    )


@pytest.mark.slow
def test_no_process_is_left_waiting(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(SCRIPTS / "hanging_in_group.py"), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    assert "The reward function 'slow_judge' did not return within 2 seconds" in done.stderr
