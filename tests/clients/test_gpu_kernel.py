"""The kernels for GPUs, run by Triton's interpreter where there is no GPU, and compiled for one.

The interpreter must be chosen before Triton is imported, so the last test starts this file again for it.
"""

import logging
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clients.optimizers import ActAdamW, gpu_kernel, trust_modulation

triton = pytest.importorskip("triton")
from clients import gpu_kernel as module  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="neither a GPU nor Triton's interpreter")
SHAPES = [(3,), (5, 20), (), (0,), (11, 7)]


def optimizer_of(kernel: Any, **settings: Any) -> ActAdamW:
    generator = torch.Generator().manual_seed(0)
    x = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in SHAPES]
    correction = [0.1 * torch.randn(shape, generator=generator) for shape in SHAPES]
    v = [0.01 * torch.rand(shape, generator=generator) for shape in SHAPES]
    optimizer = ActAdamW(x, 1e-3, correction=correction, second_moment=v, steps_done=20.5, **settings)
    optimizer.kernel = kernel
    return optimizer


@runs
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"score": "local"}, {"scope": "tensor"}, {"scope": "tensor", "score": "local", "tau": 0.3},
        {"tau": 0.3, "alpha": 2.0, "gamma": 0.1}, {"tau": 1.0}, {"tau": 0.0, "alpha": 1.0},
        {"tau": 0.01, "rho": 0.1, "betas": (0.0, 0.9), "weight_decay": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_the_bits_are_those_of_the_plain_step(settings: dict[str, Any]) -> None:
    """In blocks of 64, so that a tensor has several; a parameter has no gradient once; scores are alike twice."""
    both = [optimizer_of(kernel, **settings) for kernel in (module.GpuKernel(64), None)]
    for step, spread in enumerate((1e3, 3.0, 0.4)):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(shape, generator=generator).mul_(spread).round_() for shape in SHAPES]
        for optimizer in both:
            for p, g in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                p.grad = None if step == 1 and p.dim() == 1 else g.to(DEVICE)
            optimizer.keep_scores_at = step + 1
            optimizer.step()
        assert [optimizer.path for optimizer in both] == ["Triton", "PyTorch"]
        pairs = zip(*([*o.param_groups[0]["params"], *o.second_moments(), o.scores] for o in both), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


SCORES = {
    "normal": torch.randn(300, generator=torch.Generator().manual_seed(1)),
    "few values": torch.randint(-2, 3, (300,), generator=torch.Generator().manual_seed(2)).float(),
    "all alike": torch.zeros(300),
    "zeros of both signs": torch.zeros(300).copysign(torch.randn(300, generator=torch.Generator().manual_seed(3))),
    "sorted": torch.arange(300).float(),
    "huge": torch.randn(300, generator=torch.Generator().manual_seed(4)).mul_(1e38).clamp_(-3e38, 3e38),
    "tiny": torch.randn(300, generator=torch.Generator().manual_seed(5)).mul_(1e-41),
    "one bit apart": (0x3F800000 + torch.randint(0, 4, (300,), dtype=torch.int32)).view(torch.float32),
}


@runs
@pytest.mark.parametrize("case", SCORES)
def test_the_selection_is_exact(case: str) -> None:
    """phi is read off a step of size 1 along a direction of 1, whose scores are the gradient: b1 = 0 and g = score."""
    score = SCORES[case].to(DEVICE)
    x = nn.Parameter(torch.zeros_like(score))
    x.grad = score
    optimizer = ActAdamW(
        [x], 1.0, (0.0, 0.0), eps=1.0, weight_decay=0.0, rho=1.0, tau=0.29, alpha=2.0, gamma=0.5,
        correction=[torch.ones_like(score)],
    )  # fmt: skip
    optimizer.kernel = module.GpuKernel(64)
    optimizer.step()
    assert optimizer.path == "Triton"
    order = score.cpu().sort(descending=True, stable=True).indices  # of equals the lower index first
    expected = torch.full((300,), 0.5).index_fill_(0, order[:87], 2.0)
    assert torch.equal(-x.detach().cpu(), expected)
    assert torch.equal(trust_modulation(score, 0.29, 2.0, 0.5).cpu(), expected)


@runs
def test_gradients_that_are_not_numbers_do_no_harm_to_others() -> None:
    """The round that has them ends in an error; until then nothing may crash."""
    optimizer = optimizer_of(module.GpuKernel(64))
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert optimizer.path == "Triton"


@runs
def test_a_kernel_is_taken_where_its_trial_agrees(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    device = torch.device(DEVICE)
    assert isinstance(gpu_kernel.__wrapped__(device), module.GpuKernel)

    original = module.GpuKernel.step

    def wrong_by_a_bit(kernel: Any, tensors: Any, *arguments: Any) -> Tensor | None:
        scores = original(kernel, tensors, *arguments)
        p = tensors[0][0]
        p[0] = torch.nextafter(p[0], p[0] + 1)
        return scores

    monkeypatch.setattr(module.GpuKernel, "step", wrong_by_a_bit)
    with caplog.at_level(logging.WARNING):
        assert gpu_kernel.__wrapped__(device) is None
    assert "its bits differ" in caplog.text


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="for a machine without a GPU")
def test_where_it_does_not_run_pytorchs_operations_take_its_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert gpu_kernel.__wrapped__(torch.device("cpu")) is None
    assert "ACT-AdamW's Triton kernel is left alone on cpu, PyTorch's operations are slower: " in caplog.text


@pytest.mark.skipif(INTERPRETED, reason="the compiler is not the interpreter")
def test_it_compiles_for_a_gpu_to_operations_that_round_once() -> None:
    """For an A100, here without one: no fused multiply-add, nothing approximate, denormals stay."""
    compiler = pytest.importorskip("triton.backends.compiler")
    types = {
        **dict.fromkeys(("chunks", "pointers"), "*i64"), **dict.fromkeys(("scalars", "vector"), "*fp32"),
        **dict.fromkeys(("alpha", "gamma"), "fp32"), "n": "i32",
        **dict.fromkeys(("histograms", "thresholds", "rooms", "equals", "ties", "ties_up_to", "first"), "*i32"),
    }  # fmt: skip
    constants: dict[str, dict[str, Any]] = {
        "_moments": {"OWN": False}, "_choose": {"SHIFT": 0}, "_digit": {"SHIFT": 10, "WIDTH": 11}, "_ties": {},
        "_update": {"OWN": True, "KEEP": True},
    }  # fmt: skip
    for name, fixed in constants.items():
        kernel = getattr(module, name)
        fixed |= {"BLOCK": module.BLOCK} if "BLOCK" in kernel.arg_names else {}
        signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, signature, fixed)
        options = {"num_warps": 8, "enable_fp_fusion": False}
        code = triton.compile(source, target=compiler.GPUTarget("cuda", 80, 32), options=options).asm["ptx"]
        assert not re.findall(r"\bfma\.|approx|\.ftz|\.full", code)
        assert ("div.rn.f32" in code and "sqrt.rn.f32" in code) == (name == "_moments")


@pytest.mark.skipif(INTERPRETED, reason="this is what starts it")
def test_in_tritons_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "18 passed, 3 skipped" in result.stdout
