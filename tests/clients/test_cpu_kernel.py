"""The compiled step ends in the bits of PyTorch's operations, and selects exactly whatever the scores are."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clients import cpu_kernel as module
from clients import optimizers
from clients.cpu_kernel import SOURCE, CpuKernel, cpu_kernel
from clients.optimizers import ActAdamW, trust_modulation

needs_compiler = pytest.mark.skipif(cpu_kernel() is None, reason="no C++ compiler")
LARGE = 2**18 + 12345  # above the sample, and no multiple of a chunk


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def optimizer_of(shapes: Sequence[tuple[int, ...]], compiled: bool, **settings: Any) -> ActAdamW:
    generator = torch.Generator().manual_seed(0)
    x = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    correction = [0.1 * torch.randn(shape, generator=generator) for shape in shapes]
    v = [0.01 * torch.rand(shape, generator=generator) for shape in shapes]
    optimizer = ActAdamW(x, 1e-3, correction=correction, second_moment=v, steps_done=20.5, **settings)
    optimizer.kernel = "fitting" if compiled else None
    return optimizer


def parameters(optimizer: ActAdamW) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@needs_compiler
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"score": "local"}, {"scope": "tensor"}, {"tau": 0.3, "alpha": 2.0, "gamma": 0.1}, {"tau": 1.0},
        {"tau": 0.0, "alpha": 1.0}, {"tau": 0.01, "rho": 0.1, "betas": (0.0, 0.9), "weight_decay": 0.0},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shapes", [[(3,), (5, 2), (), (0,)], [(300, 1001), (77,), (1,)]], ids=["small", "large"])
def test_the_bits_are_those_of_the_plain_step(shapes: Any, settings: dict[str, Any], count: int) -> None:
    torch.set_num_threads(count)
    both = [optimizer_of(shapes, compiled, **settings) for compiled in (True, False)]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(*map(parameters, both), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            if step == 2:
                p.grad.mul_(3).round_()  # scores that are alike
            q.grad = None if step == 1 and p.dim() == 1 else p.grad.clone()
            p.grad = p.grad if q.grad is not None else None
        for optimizer in both:
            optimizer.keep_scores_at = step + 1
            optimizer.step()
        assert [optimizer.path for optimizer in both] == ["C++", "PyTorch"]
        for p, q in zip(*map(parameters, both), strict=True):
            assert torch.equal(p, q)
            for name in ("m", "v"):
                assert torch.equal(both[0].state[p][name], both[1].state[q][name])
        if both[0].scores is not None:
            assert torch.equal(both[0].scores, both[1].scores)


def modulation(score: Tensor, trusted: int) -> Tensor:
    """By a stable sort: the largest first, and of equals the lower index."""
    phi = torch.full_like(score, 0.5)
    phi[score.sort(descending=True, stable=True).indices[:trusted]] = 2.0
    return phi


def sampled() -> Tensor:
    """The entries that the kernel's sample sees."""
    size, indices = int(np.cbrt(LARGE) * np.cbrt(LARGE) / 2), []
    for i in range(size):
        begin, end = i * LARGE // size, (i + 1) * LARGE // size
        random = (i * 0x9E3779B97F4A7C15 % 2**64) >> 32
        indices.append(begin + (random * (end - begin) >> 32))
    return torch.tensor(indices)


SCORES = {
    "normal": torch.randn(LARGE, generator=torch.Generator().manual_seed(1)),
    "few values": torch.randint(-2, 3, (LARGE,), generator=torch.Generator().manual_seed(2)).float(),
    "all alike": torch.zeros(LARGE),
    "zeros of both signs": torch.zeros(LARGE).copysign(torch.randn(LARGE, generator=torch.Generator().manual_seed(3))),
    "sorted": torch.arange(LARGE).float(),
    "mostly zeros": torch.randn(LARGE, generator=torch.Generator().manual_seed(5)).clamp(min=1).sub(1),
    "misleading": torch.arange(LARGE).float().sin().index_fill(0, sampled(), 100.0),
    "infinite": torch.randn(LARGE, generator=torch.Generator().manual_seed(4)).mul_(1e38).mul_(10),
}


def compiled_modulation(score: Tensor, tau: float) -> Tensor:
    """phi, read off a step of size 1 along a direction of 1, whose scores are the gradient: b1 = 0 and g = score."""
    x = nn.Parameter(torch.zeros_like(score))
    x.grad = score.clone()
    optimizer = ActAdamW(
        [x], 1.0, (0.0, 0.0), eps=1.0, weight_decay=0.0, rho=1.0, tau=tau, alpha=2.0, gamma=0.5,
        correction=[torch.ones_like(score)],
    )  # fmt: skip
    optimizer.step()
    assert optimizer.path == "C++"
    return -x.detach()


@needs_compiler
@pytest.mark.parametrize("case", SCORES)
@pytest.mark.parametrize("tau", [0.5, 0.1, 0.97])
def test_the_compiled_selection_is_exact(case: str, tau: float) -> None:
    score = SCORES[case]
    if case == "infinite":
        score = score.clamp(-3e38, 3e38)  # an infinite gradient has no direction
    assert torch.equal(compiled_modulation(score, tau), modulation(score, int(tau * LARGE)))


@pytest.mark.parametrize("case", SCORES)
@pytest.mark.parametrize("tau", [0.5, 0.1, 0.97])
def test_the_plain_selection_is_exact(case: str, tau: float) -> None:
    assert torch.equal(trust_modulation(SCORES[case], tau, 2.0, 0.5), modulation(SCORES[case], int(tau * LARGE)))


@needs_compiler
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
@pytest.mark.parametrize("n", [10, LARGE])
def test_gradients_that_are_not_numbers_do_no_harm_to_others(n: int, share: float) -> None:
    """The round that has them ends in an error; until then nothing may crash."""
    x = nn.Parameter(torch.zeros(n))
    optimizer = ActAdamW([x], 1e-3)
    x.grad = torch.where(torch.rand(n) < share, torch.nan, torch.randn(n))
    optimizer.step()
    x.grad = torch.full((n,), torch.inf)
    optimizer.step()


def test_what_the_kernel_does_not_take_goes_the_plain_way() -> None:
    x = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = ActAdamW([x], 1e-3)
    x.grad = torch.ones_like(x)
    optimizer.step()
    assert optimizer.path == "PyTorch"


@needs_compiler
def test_channels_last_weights_step_to_the_same_bits_and_stay_so() -> None:
    """Also where scores are alike: the lower index is the logical one, whatever the memory has."""
    results = []
    for compiled in (True, False):
        generator = torch.Generator().manual_seed(0)
        x = [torch.randn(8, 4, 3, 3, generator=generator), torch.randn(5, generator=generator)]
        x = [nn.Parameter(x[0].to(memory_format=torch.channels_last)), nn.Parameter(x[1])]
        optimizer = ActAdamW(x, 1e-2, tau=0.3, correction=[torch.ones_like(p) for p in x])
        optimizer.kernel = "fitting" if compiled else None
        for _ in range(3):
            for p in x:
                p.grad = torch.empty_like(p).copy_(torch.randint(-1, 2, p.shape, generator=generator))
            optimizer.step()
        assert optimizer.path == ("C++" if compiled else "PyTorch")
        assert x[0].is_contiguous(memory_format=torch.channels_last)
        results.append([*x, *optimizer.second_moments()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "g++ --no-such-option"])
def test_without_a_compiler_there_is_no_kernel(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu_kernel.__wrapped__() is None
    assert list(tmp_path.rglob("*.so")) == []


@needs_compiler
def test_it_is_compiled_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs, original = [], subprocess.run

    def run(command: Any, **options: Any) -> Any:
        runs.append(command[-1])
        return original(command, **options)

    monkeypatch.setattr(module.subprocess, "run", run)
    assert cpu_kernel.__wrapped__() is not None
    (library,) = (tmp_path / "fedact").iterdir()
    assert cpu_kernel.__wrapped__() is not None
    assert [command == "--version" for command in runs] == [True, False, True]
    assert library.suffix == ".so"
    (tmp_path / "other.so").write_bytes(b"not a library")
    with pytest.raises(OSError, match=r"other\.so"):
        CpuKernel(tmp_path / "other.so")


@needs_compiler
def test_the_source_gives_no_warning(tmp_path: Path) -> None:
    (tmp_path / "x.cpp").write_text(SOURCE)
    command = ["g++", "-std=c++17", "-fopenmp", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(tmp_path / "x.cpp")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_small_samples_bracket_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain selection with a sample of 16: wrong brackets are common, and wrong results are none."""
    monkeypatch.setattr(optimizers, "SAMPLE", 16)
    generator = torch.Generator().manual_seed(0)
    for n in range(17, 117):
        score = torch.randint(-9, 10, (n,), generator=generator).float()
        for trusted in (1, n // 3, n - 1):
            tau = trusted / n + 1e-9
            assert torch.equal(trust_modulation(score, tau, 2.0, 0.5), modulation(score, int(tau * n)))
