"""ACT-AdamW, FedACT's local optimizer.

Source: "FedACT: Federated Adaptive Coordinate Trust Modulation for Robust Transformer Training under Data
Heterogeneity", Algorithm 1. Where the paper leaves room, the decision is documented at the place it concerns.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clients.cpu_kernel import CpuKernel, cpu_kernel

if TYPE_CHECKING:
    from clients.gpu_kernel import GpuKernel

    Kernel: TypeAlias = CpuKernel | GpuKernel

log = logging.getLogger(__name__)

SAMPLE = 2**16  # entries that bracket the threshold of the selection


class StabilityWarning(UserWarning):
    """The settings are at or beyond the edge of what the paper's analysis covers."""


def stability_note(rho: float, tau: float, alpha: float) -> str | None:
    """What is at or beyond the edge of stability in these settings, or None.

    A trusted coordinate moves by eta alpha rho Delta_G along the shared correction. With alpha rho >= 1 the
    correction alone repeats the last round's whole step, so nothing damps it; Lemma 2 assumes rho < tau.
    """
    notes = []
    if alpha * rho >= 1:
        notes.append(f"alpha * rho = {alpha:g} * {rho:g} = {alpha * rho:g} is not below 1, the edge of stability")
    if rho >= tau:
        notes.append(f"rho = {rho:g} is not below tau = {tau:g}, as the paper's Lemma 2 assumes")
    return "; ".join(notes) or None


def trust_modulation(score: Tensor, tau: float, alpha: float, gamma: float) -> Tensor:
    """phi: alpha on the floor(tau d) largest of the d scores, gamma on the rest.

    Exactly floor(tau d) entries are trusted; ties go to the lower index, so the result does not depend on the
    device or the number of threads. tau is taken as the decimal number that it prints as: floor(0.29 * 100) is
    29, although the product of the floats is just below.

    Parameters
    ----------
    score : Tensor
        One vector of shape (d,).
    tau : float
        In [0, 1].
    alpha, gamma : float
        Modulation of trusted and of other coordinates.

    Returns
    -------
    Tensor
        phi, with the shape, dtype and device of ``score``.
    """
    d = score.numel()
    trusted = _trusted(tau, d)
    if trusted == d:
        return torch.full_like(score, alpha)
    phi = torch.full_like(score, gamma)
    if trusted == 0:
        return phi
    threshold, above = _kth_largest(score, trusted)
    greater, ties = score > threshold, score == threshold
    room = trusted - above
    if room == ties.sum():
        return phi.masked_fill_(greater | ties, alpha)
    return phi.masked_fill_(greater | (ties & (ties.cumsum(0) <= room)), alpha)


def _kth_largest(score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k-th largest entry, and how many are larger, 0 < k < d.

    A sample brackets it, and it is sought among the entries of the bracket (Floyd and Rivest 1975): sorting all of a
    large vector takes ten times as long as the step.
    """
    d, kept, above = score.numel(), score, torch.zeros((), dtype=torch.int64, device=score.device)
    if d > SAMPLE:
        sample = score[torch.arange(SAMPLE, device=score.device) * d // SAMPLE].sort(descending=True).values
        middle, reach = (
            k * SAMPLE // d,
            4 * math.isqrt(SAMPLE) // 2 + 4,
        )
        low, high = sample[min(middle + reach, SAMPLE - 1)], sample[max(middle - reach, 0)]
        greater = (score > high).sum()
        bracket = score[(score >= low) & (score <= high)]
        if 0 < k - greater.item() <= len(bracket):  # else the sample was misleading
            kept, above = bracket, greater
    threshold = kept.topk(k - int(above), sorted=False).values.min()
    return threshold, above + (kept > threshold).sum()


class ActAdamW(Optimizer):
    """AdamW with a shared correction of the direction and a trust modulation of each coordinate.

    With g the gradient, k the steps of this optimizer and t = steps_done + k, a step is::

        m = b1 m + (1 - b1) g                v = b2 v + (1 - b2) g g
        m_hat = m / (1 - b1^k)               v_hat = v / (1 - b2^t)
        u = (1 - rho) m_hat / (sqrt(v_hat) + eps) + rho Delta_G
        phi = alpha on the floor(tau d) largest scores s = u g, gamma on the rest
        x = (1 - lr weight_decay) x - lr phi u

    The weight decay is scaled neither by (1 - rho) nor by phi. Parameters without a gradient, frozen or unused in
    a step, take no part in it: their moments stay, and d does not count them. A parameter given twice counts once.

    Parameters
    ----------
    params : iterable of Tensor or of dict
        Parameters, or groups of them with their own lr, betas, eps, weight_decay and rho. float32 or float64.
    lr : float
        eta, at least 0.
    betas : (float, float)
        Each in [0, 1).
    eps : float
        At least 0.
    weight_decay : float
        lambda, decoupled, at least 0.
    rho : float
        Share of the correction in the direction, in [0, 1].
    tau : float
        Share of trusted coordinates, in [0, 1].
    alpha, gamma : float, optional
        Modulation of trusted and other coordinates, at least 0; 1 / tau and tau if None. Setting one leaves the
        other at its default.
    scope : {"global", "tensor"}
        Whether the top is taken over the whole trainable vector, as in the paper, or within each tensor.
    score : {"corrected", "local"}
        Whether a coordinate is scored with the corrected direction u (FedACT) or with its local part
        m_hat / (sqrt(v_hat) + eps) (FedACT-Local). The step uses the corrected direction in both.
    correction, second_moment : sequence of Tensor, optional
        Delta_G and v_bar, one tensor per trainable parameter, in order; zeros if None. The second is copied.
    steps_done : float
        (r - 1) K, the steps behind ``second_moment``; not a whole number where clients did different numbers.

    Raises
    ------
    ValueError
        For values outside these ranges and tensors that don't fit the parameters.

    Warns
    -----
    StabilityWarning
        See `stability_note`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        rho: float = 0.5,
        tau: float = 0.5,
        alpha: float | None = None,
        gamma: float | None = None,
        scope: Literal["global", "tensor"] = "global",
        score: Literal["corrected", "local"] = "corrected",
        correction: Sequence[Tensor] | None = None,
        second_moment: Sequence[Tensor] | None = None,
        steps_done: float = 0,
    ) -> None:
        if alpha is None and tau == 0:
            raise ValueError("tau = 0: alpha = 1 / tau has no value; set alpha")
        self.tau = tau
        self.alpha = 1 / tau if alpha is None else alpha
        self.gamma = tau if gamma is None else gamma
        self.scope = scope
        self.score = score
        self.steps_done = steps_done
        self.keep_scores_at: int | None = None
        self.scores: Tensor | None = None
        self.kernel: Kernel | Literal["fitting"] | None = "fitting"  # None: PyTorch's operations, to the same bits
        self.path = ""  # which way the last step went: "C++", "Triton" or "PyTorch"
        _check(0 <= tau <= 1, "tau", tau, "[0, 1]")
        _check(self.alpha >= 0, "alpha", self.alpha, "0 or more")
        _check(self.gamma >= 0, "gamma", self.gamma, "0 or more")
        _check(scope in ("global", "tensor"), "scope", scope, "'global' or 'tensor'")
        _check(score in ("corrected", "local"), "score", score, "'corrected' or 'local'")
        _check(steps_done >= 0, "steps_done", steps_done, "0 or more")

        given: list[Any] = list(params)
        if given and isinstance(given[0], Tensor):
            given = list(dict.fromkeys(given))
        super().__init__(given, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rho": rho})
        for group in self.param_groups:
            _check(group["lr"] >= 0, "lr", group["lr"], "0 or more")
            _check(all(0 <= b < 1 for b in group["betas"]), "betas", group["betas"], "[0, 1) each")
            _check(group["eps"] >= 0, "eps", group["eps"], "0 or more")
            _check(group["weight_decay"] >= 0, "weight_decay", group["weight_decay"], "0 or more")
            _check(0 <= group["rho"] <= 1, "rho", group["rho"], "[0, 1]")
            if note := stability_note(group["rho"], tau, self.alpha):
                warnings.warn(note, StabilityWarning, stacklevel=2)

        self._trainable = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        corrections = self._fit("correction", correction, copy=False)  # which is only read
        second_moments = self._fit("second_moment", second_moment)
        for p, delta, v in zip(self._trainable, corrections, second_moments, strict=True):
            m = torch.zeros_like(p, memory_format=torch.contiguous_format)
            self.state[p] = {"step": 0, "m": m, "v": v, "correction": delta}

    def _fit(self, name: str, given: Sequence[Tensor] | None, copy: bool = True) -> list[Tensor]:
        """Tensors like the trainable parameters, from ``given`` or zero."""
        if given is None:
            return [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in self._trainable]
        shapes = [tuple(p.shape) for p in self._trainable]
        if [tuple(t.shape) for t in given] != shapes:
            raise ValueError(f"{name}: shapes {[tuple(t.shape) for t in given]}, the parameters have {shapes}")
        fitting = [t.to(p.device, p.dtype) for p, t in zip(self._trainable, given, strict=True)]
        if not copy:
            return [t.contiguous() for t in fitting]
        return [t.clone(memory_format=torch.contiguous_format) for t in fitting]

    def second_moments(self) -> list[Tensor]:
        """The raw v, not bias-corrected: one tensor per trainable parameter, in order. Not copied."""
        return [self.state[p]["v"] for p in self._trainable]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. Where it is step number ``keep_scores_at``, its scores are kept in ``scores``, shape (d,)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        active: list[tuple[Tensor, Tensor, dict[str, Any]]] = []  # parameters with their gradients and groups
        for group in self.param_groups:
            active += [(p, p.grad, group) for p in group["params"] if p.grad is not None]
        if any(p.dtype not in (torch.float32, torch.float64) or g.is_sparse for p, g, _ in active):
            raise ValueError("ActAdamW takes dense float32 or float64 parameters; use autocast for bfloat16")
        for p, _, _ in active:
            self.state[p]["step"] += 1
        step = max((self.state[p]["step"] for p, _, _ in active), default=0)
        kernel = None
        if self.kernel and _fits_kernel(active, self.state):
            kernel = _kernel_of(active[0][0].device) if self.kernel == "fitting" else self.kernel
        self.path = kernel.name if kernel else "PyTorch"
        keep = bool(active) and step == self.keep_scores_at
        scores = self._compiled_step(kernel, active, keep) if kernel else self._plain_step(active)
        self.scores = scores if keep else None
        return loss

    def _scalars(self, p: Tensor, group: dict[str, Any]) -> tuple[float, ...]:
        """What a step multiplies with, in the order in which `CpuKernel.step` takes it."""
        (beta1, beta2), k, lr = group["betas"], self.state[p]["step"], group["lr"]
        unbias1, unbias2 = 1 / (1 - beta1**k), 1 / (1 - beta2 ** (self.steps_done + k))
        decay, rho = 1 - lr * group["weight_decay"], group["rho"]
        return beta1, 1 - beta1, beta2, 1 - beta2, unbias1, unbias2, group["eps"], 1 - rho, rho, decay, lr

    def _compiled_step(
        self, kernel: "Kernel", active: Sequence[tuple[Tensor, Tensor, dict[str, Any]]], keep_scores: bool
    ) -> Tensor | None:
        """The step in few passes over memory. Gives the scores if they are to be kept."""
        each_tensor = self.scope == "tensor"
        sizes = [p.numel() for p, _, _ in active]
        flat = [p.contiguous() for p, _, _ in active]  # copies of channels-last weights alone
        scores = kernel.step(
            [
                (x, g.contiguous(), *(self.state[p][name] for name in ("m", "v", "correction")))
                for x, (p, g, _) in zip(flat, active, strict=True)
            ],
            [self._scalars(p, group) for p, _, group in active],
            [_trusted(self.tau, size) for size in (sizes if each_tensor else [sum(sizes)])],
            each_tensor,
            self.score == "local",
            keep_scores,
            self.alpha,
            self.gamma,
        )
        for x, (p, _, _) in zip(flat, active, strict=True):
            if x is not p:
                p.copy_(x)
        return scores

    def _plain_step(self, active: Sequence[tuple[Tensor, Tensor, dict[str, Any]]]) -> Tensor:
        """The same, with PyTorch's operations, to the same bits: each of them rounds once. Gives the scores."""
        if not active:
            return torch.empty(0)
        x, g, groups = zip(*active, strict=True)
        m, v, correction = ([self.state[p][name] for p in x] for name in ("m", "v", "correction"))
        beta1, rest1, beta2, rest2, unbias1, unbias2, eps, own, shared, decay, lr = (
            list(scalars) for scalars in zip(*map(self._scalars, x, groups), strict=True)
        )
        torch._foreach_mul_(m, beta1)
        torch._foreach_add_(m, torch._foreach_mul(g, rest1))
        squares = torch._foreach_mul(g, g)
        torch._foreach_mul_(squares, rest2)
        torch._foreach_mul_(v, beta2)
        torch._foreach_add_(v, squares)

        denominators = torch._foreach_mul(v, unbias2)
        _sqrt_(denominators)
        torch._foreach_add_(denominators, eps)
        local = torch._foreach_mul(m, unbias1)
        torch._foreach_div_(local, denominators)
        del squares, denominators
        u = torch._foreach_mul(local, own)
        torch._foreach_add_(u, torch._foreach_mul(correction, shared))
        scored = torch._foreach_mul(local if self.score == "local" else u, g)
        del local
        scores = torch.cat([s.flatten() for s in scored])
        del scored

        sizes = [p.numel() for p in x]
        parts = scores.split(sizes)
        if self.scope == "tensor":
            phi: Sequence[Tensor] = [trust_modulation(s, self.tau, self.alpha, self.gamma) for s in parts]
        else:
            phi = trust_modulation(scores, self.tau, self.alpha, self.gamma).split(sizes)
        torch._foreach_mul_(u, [part.view_as(p) for part, p in zip(phi, x, strict=True)])
        torch._foreach_mul_(u, lr)
        torch._foreach_mul_(x, decay)
        torch._foreach_sub_(x, u)
        return scores


def _sqrt_(tensors: tuple[Tensor, ...]) -> None:
    """In place, each rounded correctly: PyTorch's own on a CPU leaves that to MKL, which does not always."""
    if tensors[0].device.type != "cpu":
        torch._foreach_sqrt_(tensors)
        return
    for tensor in tensors:
        array = tensor.numpy()
        np.sqrt(array, out=array)


def _trusted(tau: float, d: int) -> int:
    """floor(tau d), with tau the decimal number that it prints as."""
    return math.floor(Fraction(repr(float(tau))) * d)


def _fits_kernel(active: Sequence[tuple[Tensor, Tensor, dict[str, Any]]], state: Mapping[Tensor, Any]) -> bool:
    return bool(active) and all(
        p.device == active[0][0].device and p.dtype == g.dtype == torch.float32
        and all(state[p][name].is_contiguous() for name in ("m", "v", "correction"))
        for p, g, _ in active
    )  # fmt: skip


def _kernel_of(device: torch.device) -> "Kernel | None":
    if device.type == "cpu":
        return cpu_kernel()
    return gpu_kernel(device) if device.type == "cuda" else None


@cache
def gpu_kernel(device: torch.device) -> "GpuKernel | None":
    """The kernel of this GPU, where a trial of it ends in the bits of PyTorch's operations there; None otherwise."""
    if find_spec("triton") is None:
        return None
    try:
        from clients.gpu_kernel import GpuKernel

        kernel, reason = GpuKernel(), "its bits differ"
        if _agrees(kernel, device):
            return kernel
    except Exception as error:  # noqa: BLE001: a compiler's or a driver's, of whatever version
        reason = f"{type(error).__name__}: {error}"
    log.warning("ACT-AdamW's Triton kernel is left alone on %s, PyTorch's operations are slower: %s", device, reason)
    return None


def _agrees(kernel: "Kernel", device: torch.device) -> bool:
    """Whether two steps of the kernel, of different scores and of scores alike, end in the plain steps' bits."""
    scopes: tuple[Literal["global", "tensor"], ...] = ("global", "tensor")
    for scope in scopes:
        ends = []
        for way in (kernel, None):
            generator = torch.Generator().manual_seed(0)
            start, correction = ([torch.randn(n, generator=generator) for n in (5000, 3, 1)] for _ in range(2))
            x = [nn.Parameter(t.to(device)) for t in start]
            optimizer = ActAdamW(x, 1e-2, rho=0.2, tau=0.4, scope=scope, correction=correction)
            optimizer.kernel = way
            for spread in (1e3, 1.0):
                for p in x:
                    p.grad = torch.randn(p.shape, generator=generator).mul_(spread).round_().to(device)
                optimizer.step()
            ends.append(torch.cat([*x, *optimizer.second_moments()]).cpu())
        if not torch.equal(*ends):
            return False
    return True


def _check(valid: bool, name: str, value: object, allowed: str) -> None:
    if not valid:
        raise ValueError(f"{name} = {value}: allowed is {allowed}")
