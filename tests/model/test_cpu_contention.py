"""A run uses fewer threads, or says so, when others take the cores that its threads need."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from groupwise.config.schema import EngineConfig
from groupwise.engine import cpu_runner
from groupwise.engine.engine import Engine
from groupwise.model import device
from groupwise.model.device import (
    CPUThreads,
    CPUUsage,
    contention_notice,
    cores_of_others,
    our_cores,
    products_keep_bits,
    repeatable_linear,
    used,
)
from groupwise.model.ops.logprobs import token_logprobs
from groupwise.records import Completion, Request, Sampling

BEFORE = CPUUsage(clock=100.0, everyone=50.0, own=10.0)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def notice_after(seconds: float, *, everyone: float, own: float, threads: int, cores: int) -> str | None:
    after = CPUUsage(clock=BEFORE.clock + seconds, everyone=BEFORE.everyone + everyone, own=BEFORE.own + own)
    others = cores_of_others(BEFORE, after)
    return None if others is None else contention_notice(others, threads=threads, cores=cores, adapts=False)


@pytest.mark.parametrize(
    ("everyone", "own", "threads", "cores", "advice"),
    [
        (6.0, 2.0, 2, 2, "use 1.0 of 2 cores, and 2 threads .* OMP_NUM_THREADS=1 "),
        (14.0, 2.0, 8, 8, "use 3.0 of 8 cores, and 8 threads .* OMP_NUM_THREADS=5 "),
        (10.0, 2.0, 2, 2, "OMP_NUM_THREADS=1 "),  # both are taken: one thread is the least
        (3.0, 2.0, 2, 2, None),  # a quarter of a core
        (14.0, 2.0, 4, 8, None),  # there are enough for all
        (6.0, 2.0, 1, 2, None),
        (10.0, 2.0, 1, 2, None),  # no fewer than one
    ],
)
def test_others_are_mentioned_when_too_few_cores_are_left(everyone, own, threads, cores, advice):
    notice = notice_after(4.0, everyone=everyone, own=own, threads=threads, cores=cores)
    if advice is None:
        assert notice is None
    else:
        assert notice is not None
        assert re.search(advice, notice)


def test_time_that_ended_children_take_along_is_not_that_of_others():
    assert cores_of_others(BEFORE, CPUUsage(clock=104.0, everyone=52.0, own=15.0)) == 0.0


def test_a_moment_is_too_short_to_tell():
    assert notice_after(0.2, everyone=0.4, own=0.0, threads=2, cores=2) is None


def test_a_system_that_does_not_tell_is_believed_to_be_idle(tmp_path: Path):
    assert used(tmp_path, cores=frozenset({0}), pid=1) is None
    (tmp_path / "stat").write_text("cpu0 none of it\n")
    assert used(tmp_path, cores=frozenset({0}), pid=1) is None
    assert cores_of_others(None, None) is None


def planted(
    proc: Path, pid: int, *, name: str, parent: int, user: int, system: int, ended: tuple[int, int] = (0, 0)
) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(
        f"{pid} ({name}) S {parent} 0 0 0 0 0 0 0 0 0 {user} {system} {ended[0]} {ended[1]} 20"
    )


def test_only_our_cores_count_and_children_are_no_others(tmp_path: Path):
    #          user nice system idle waiting, interrupts: hard, soft; then stolen
    lines = ["cpu  9 9 9 9 9 9 9 9", "cpu0 1000 200 300 90000 5000 10 90 7", "cpu1 50 0 50 1 1 0 0 0"]
    (tmp_path / "stat").write_text("\n".join([*lines, "cpu2 7000 0 0 0 0 0 0 0", "intr 5 5"]))
    planted(tmp_path, 7, name="python", parent=1, user=100, system=20)
    planted(tmp_path, 8, name="worker (of) 7", parent=7, user=30, system=3, ended=(500, 60))
    planted(tmp_path, 9, name="its own", parent=8, user=4, system=0)
    planted(tmp_path, 10, name="a stranger", parent=1, user=999, system=0)
    found = used(tmp_path, cores=frozenset({0, 1}), pid=7)
    assert found is not None
    second = os.sysconf("SC_CLK_TCK")
    assert found.everyone == pytest.approx((1600 + 100) / second)
    assert found.own == pytest.approx((120 + 33 + 560 + 4) / second)


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="only Linux tells")
def test_this_machine_tells():
    found = used(cores=our_cores(), pid=os.getpid())
    assert found is not None
    assert found.everyone > 0
    assert found.own > 0


@pytest.fixture
def load(monkeypatch) -> Callable[[float], None]:
    """Let four seconds pass in which others use so many of two cores."""
    now = [BEFORE]
    monkeypatch.setattr(device, "used", lambda **_: now[0])
    monkeypatch.setattr(device, "our_cores", lambda: frozenset({0, 1}))

    def set_load(others: float) -> None:
        clock, everyone, own = now[0]
        now[0] = CPUUsage(clock=clock + 4.0, everyone=everyone + 4.0 * (1 + others), own=own + 4.0)

    return set_load


def test_threads_follow_the_load(two_threads, load):
    threads = CPUThreads(lambda count: True)
    counts, notices = [], []
    for others in (0.0, 1.3, 0.9, 0.1, 1.0):
        load(others)
        notices.append(threads.adapt())
        counts.append(torch.get_num_threads())
    assert counts == [2, 1, 1, 2, 1]
    assert [notice for notice in notices if notice] == [
        "other processes use 1.3 of 2 cores; until they end, 1 of 2 threads compute, with the same results"
    ]
    threads.restore()
    assert torch.get_num_threads() == 2


def test_without_other_processes_the_number_of_threads_is_never_set(two_threads, load, monkeypatch):
    # Setting it, even to the same number, makes MKL use all threads for every small product.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail("the number of threads was set"))
    threads = CPUThreads(lambda count: True)
    for others in (0.0, 0.2):
        load(others)
        assert threads.adapt() is None
    threads.restore()


def test_threads_stay_if_fewer_would_change_the_results(two_threads, load):
    threads = CPUThreads(lambda count: False)
    load(1.3)
    notice = threads.adapt()
    assert notice is not None
    assert "2 threads contend" in notice
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("rows", range(1, 18))
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_of_few_rows_is_that_of_linear(two_threads, rows, biased):
    generator = torch.Generator().manual_seed(rows)
    x_NI, weight_OI = torch.randn(rows, 192, generator=generator), torch.randn(272, 192, generator=generator)
    bias_O = torch.randn(272, generator=generator) if biased else None
    exact_NO = torch.nn.functional.linear(
        x_NI.double(), weight_OI.double(), None if bias_O is None else bias_O.double()
    )
    assert torch.allclose(repeatable_linear(x_NI, weight_OI, bias_O).double(), exact_NO, atol=1e-4)


def test_the_number_of_threads_is_compared_without_side_effects(two_threads, monkeypatch):
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    weights = [(torch.ones(272, 192), None), (torch.ones(64, 192), torch.ones(64))]
    products_keep_bits(weights, threads=1)
    assert torch.equal(torch.get_rng_state(), expected)
    assert torch.get_num_threads() == 2
    linear = device.repeatable_linear
    monkeypatch.setattr(
        device, "repeatable_linear", lambda x, w, b: linear(x, w, b) + (torch.get_num_threads() == 1)
    )
    assert not products_keep_bits(weights, threads=1)
    assert torch.get_num_threads() == 2


def test_a_policy_without_the_fused_forward_pass_keeps_its_threads(two_threads, small_policy, monkeypatch):
    monkeypatch.setattr(cpu_runner, "fused_cpu_forward", lambda policy: None)
    assert not cpu_runner.keeps_bits(small_policy, threads=1)


@pytest.mark.parametrize("reason", ["three threads", "large vocabulary", "large model", "adapter"])
def test_threads_stay_where_equal_bits_are_not_established(two_threads, small_policy, monkeypatch, reason):
    monkeypatch.setattr(cpu_runner, "products_keep_bits", lambda weights, *, threads: True)
    assert cpu_runner.keeps_bits(small_policy, threads=1)
    match reason:
        case "three threads":
            torch.set_num_threads(3)
        case "large vocabulary":
            monkeypatch.setattr(cpu_runner, "SUMMED_BY_SEVERAL", small_policy.head_weight.shape[0])
        case "large model":
            monkeypatch.setattr(cpu_runner, "MOST_COMPARED", 1000)
        case "adapter":
            monkeypatch.setattr(type(small_policy), "has_adapter", True)
    assert not cpu_runner.keeps_bits(small_policy, threads=1)


def test_completions_have_the_same_bits_with_one_thread_as_with_two(two_threads, small_policy):
    if not cpu_runner.keeps_bits(small_policy, threads=1):
        pytest.skip("the matrix library of this machine rounds differently")

    def generated() -> list[list[Completion]]:
        engine, sampling = Engine(small_policy, EngineConfig()), Sampling(max_tokens=8)
        batches = [[Request(prompt=(5, 6, 7), seeds=tuple(range(count)))] for count in range(1, 18)]
        return [engine.generate(batch, sampling)[0] for batch in batches]

    with_two = generated()
    torch.set_num_threads(1)
    assert generated() == with_two


def test_gradients_have_the_same_bits_with_one_thread_as_with_two(two_threads, small_policy):
    if not cpu_runner.keeps_bits(small_policy, threads=1):
        pytest.skip("the matrix library of this machine rounds differently")
    weight_VM = small_policy.head_weight.detach().requires_grad_()
    generator = torch.Generator().manual_seed(0)

    def gradients(tokens: int, frozen: bool) -> tuple[torch.Tensor, ...]:
        hidden_NM = torch.randn(tokens, weight_VM.shape[1], generator=generator.manual_seed(tokens))
        hidden_NM.requires_grad_()
        tokens_N = torch.arange(tokens) % weight_VM.shape[0]
        head = weight_VM.detach() if frozen else weight_VM
        logprobs_N, _ = token_logprobs(hidden_NM, head, None, tokens_N, Sampling(), entropy_gradient=False)
        return torch.autograd.grad(logprobs_N.sum(), [hidden_NM] if frozen else [hidden_NM, weight_VM])

    cases = [(tokens, frozen) for tokens in range(1, 18) for frozen in (False, True)]
    with_two = [gradients(*case) for case in cases]
    torch.set_num_threads(1)
    for case, expected in zip(cases, with_two, strict=True):
        assert all(map(torch.equal, gradients(*case), expected)), case
