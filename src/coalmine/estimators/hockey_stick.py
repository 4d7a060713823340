"""The hockey-stick divergence of two Gaussians and its inverse (Appendix A), one direction at a time, on whole arrays.

Appendix A searches over epsilon and computes, for each, where the privacy loss exceeds it. We search over the edge of
that region instead. Scale the first Gaussian P to N(0, 1) and mirror the second so that Q = N(shift, (1 + stretch)²) with
shift >= 0. The privacy loss log(p/q) is a parabola, and the set where it exceeds epsilon is

    x < edge, or x > far     where Q is narrower (stretch <= 0),
    far < x < edge           where Q is wider (stretch > 0),

with `far` the mirror image of `edge` in the parabola's vertex. The value of the parabola at an edge is its epsilon, so no
quadratic is solved. At an edge p = e^epsilon·q, so e^epsilon·Q(tail) is the Mills ratio of Q's tail times p, and no large
numbers are subtracted. Delta grows with the edge.

The functions here trust their arguments and expect numpy's floating-point warnings to be off.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import erf, erfcx, ndtr, ndtri_exp

from coalmine.argument_checks import Floats

FAR = 1e100  # stands for infinity where inf - inf must not arise
NEARLY_ALL = 0.99  # when e^epsilon·Q(region) is more than this part of P(region), their difference is integrated
NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)
ROOT_HALF = np.sqrt(0.5)


@dataclass(frozen=True)
class Pair:
    """P = N(0, 1) against Q = N(shift, std²), std = 1 + stretch; arrays of one length."""

    shift: Floats
    stretch: Floats
    std: Floats

    @cached_property
    def bend(self) -> Floats:
        """1 - std²: twice std² times the leading coefficient of the privacy loss."""
        return -self.stretch * (2 + self.stretch)

    @cached_property
    def log_std(self) -> Floats:
        return np.where(np.abs(self.stretch) < 0.5, np.log1p(self.stretch), np.log(self.std))

    @cached_property
    def vertex(self) -> Floats:
        vertex = np.clip(self.shift / self.bend, -FAR, FAR)
        return np.where(self.stretch == 0, FAR, vertex)

    def take(self, rows: Any) -> "Pair":
        return Pair(self.shift[rows], self.stretch[rows], self.std[rows])

    def loss(self, x: Floats) -> Floats:
        """log p(x)/q(x)."""
        slope_sum = (self.shift - (2 + self.stretch) * x) / self.std
        return self.log_std + (self.shift + self.stretch * x) / self.std * slope_sum / 2

    def slope(self, x: Floats) -> Floats:
        """Minus the derivative of the loss: at least 0 on the branch where `edge` lies."""
        return (self.shift - self.bend * x) / self.std / self.std

    def far(self, edge: Floats) -> Floats:
        return np.clip(2 * self.vertex - edge, -FAR, FAR)

    def edge(self, epsilon: Floats) -> Floats:
        """Where the loss crosses epsilon, on the branch where it falls; nan where it never reaches epsilon."""
        excess = epsilon - self.log_std
        size = np.sqrt(2 * np.abs(excess))
        unit = np.maximum(self.shift, size * self.std)  # squares of large numbers would overflow
        shift, size = self.shift / unit, size / unit
        curve = np.copysign(size * size, excess)
        root = self.std * np.sqrt(shift * shift + self.bend * curve)
        return np.clip(unit * ((shift * shift - self.std * self.std * curve) / (shift + root)), -FAR, FAR)


def one_sided_delta(pair: Pair, epsilon: Floats) -> Floats:
    """sup over events of P(event) - e^epsilon·Q(event)."""
    answer = np.zeros_like(epsilon)
    edge = pair.edge(epsilon)
    rows = np.flatnonzero(~np.isnan(edge) & ((pair.shift != 0) | (pair.stretch != 0)))
    log_scale, delta, _ = masses(pair.take(rows), edge[rows])
    answer[rows] = np.clip(np.exp(log_scale) * delta, 0.0, 1.0)
    return answer


def one_sided_epsilon(pair: Pair, delta: Floats) -> Floats:
    """The epsilon >= 0 at which sup over events of P(event) - e^epsilon·Q(event) is delta."""
    epsilon = np.zeros_like(delta)
    beyond = ~np.isfinite(pair.shift) | ~np.isfinite(pair.std) | (pair.std == 0)
    epsilon[beyond] = np.inf
    log_delta = np.log(delta)
    rows = np.flatnonzero(~beyond & ~((pair.shift == 0) & (pair.stretch == 0)))

    part, target = pair.take(rows), log_delta[rows]
    top = part.edge(np.zeros(rows.size))
    log_scale, at_zero, _ = masses(part, top)
    differs = log_scale + np.log(np.maximum(at_zero, 0)) > target
    rows, part, target, top = rows[differs], part.take(differs), target[differs], top[differs]

    wider = part.stretch > 0
    low = ndtri_exp(np.where(wider, target, target - np.log(2)))  # P alone has no more than delta below it
    low = np.where(wider, np.maximum(low, part.vertex), low)
    edge = solve_edge(part, np.minimum(low, top), top, target)
    epsilon[rows] = np.maximum(part.loss(edge), 0)
    return epsilon


def solve_edge(pair: Pair, low: Floats, high: Floats, log_delta: Floats) -> Floats:
    """The edge at which delta reaches its target: Halley's method inside a shrinking bracket.

    As a function of the edge, log delta is nearly the log of a normal cdf, whose second derivative is used.
    """
    answer, rows = low.copy(), np.arange(low.size)
    x = low
    for _ in range(200):
        log_scale, delta, q = masses(pair, x)
        miss = log_scale + np.log(np.maximum(delta, 0)) - log_delta
        low, high = np.where(miss < 0, x, low), np.where(miss > 0, x, high)
        rate = q * pair.slope(x) / delta
        newton = miss / rate
        correction = newton * (rate + x) / 2
        step = newton / (1 + np.maximum(correction, -0.5))
        following = x - step
        inside = (following >= low) & (following <= high)
        following = np.where(inside, following, low + (high - low) / 2)
        following = np.where(miss == 0, x, following)
        answer[rows] = following
        size = np.maximum(np.abs(x), 1e-3)
        done = (inside & (np.abs(step) < 1e-8 * size)) | (np.abs(following - x) <= 4e-16 * np.abs(x))
        if done.all():
            break
        x = following
        if np.count_nonzero(done) > done.size // 4:
            left = ~done
            pair, rows, x, low, high, log_delta = (
                pair.take(left),
                rows[left],
                x[left],
                low[left],
                high[left],
                log_delta[left],
            )
    return answer


def masses(pair: Pair, edge: Floats) -> tuple[Floats, Floats, Floats]:
    """log scale, delta / scale and e^epsilon·Q(region) / scale, for the region that ends at `edge`."""
    p, q = _below_zero(pair, edge)
    delta = p - q
    log_scale = np.where(edge < 0, -edge * edge / 2, 0.0)
    above = np.flatnonzero(~(edge < 0))
    if above.size:
        p[above], q[above] = _above_zero(pair.take(above), edge[above])
        delta[above] = p[above] - q[above]
    doubtful = np.flatnonzero(~(q < NEARLY_ALL * p))
    if doubtful.size:
        delta[doubtful] = _integrated(pair.take(doubtful), edge[doubtful])
    return log_scale, delta, q


def _below_zero(pair: Pair, edge: Floats) -> tuple[Floats, Floats]:
    """P(region) and e^epsilon·Q(region) in units of exp(-edge²/2), for edge < 0."""
    p = _mills(-edge)
    q = pair.std * _mills((pair.shift - edge) / pair.std)
    far = pair.far(edge)
    exponent = (edge - far) * (edge + far) / 2
    matters = np.flatnonzero(exponent > -45)  # elsewhere the far side is below rounding error
    if matters.size:
        shift, std, far = pair.shift[matters], pair.std[matters], far[matters]
        scale = np.where(pair.stretch[matters] > 0, -1.0, 1.0) * np.exp(exponent[matters])
        p[matters] += scale * _mills(np.abs(far))
        q[matters] += scale * std * _mills(np.abs(far - shift) / std)
    return p, np.maximum(q, 0)


def _above_zero(pair: Pair, edge: Floats) -> tuple[Floats, Floats]:
    """P(region) and e^epsilon·Q(region), for edge >= 0; there e^epsilon cannot overflow where it is used."""
    far = pair.far(edge)
    y, y_far = (edge - pair.shift) / pair.std, (far - pair.shift) / pair.std
    growth = np.exp(pair.loss(edge))
    near_q = np.where(y < 0, pair.std * _mills(-y) * np.exp(-edge * edge / 2), growth * ndtr(y))
    wider = pair.stretch > 0
    side, y_side = (
        np.where(wider, far, -far),
        np.where(wider, y_far, -y_far),
    )  # the far tail is the lower one if Q is wider
    far_q = np.where(y_side < 0, pair.std * np.exp(-far * far / 2) * _mills(-y_side), growth * ndtr(y_side))
    p = np.where(wider, ndtr(edge) - ndtr(side), ndtr(edge) + ndtr(side))
    q = np.where(wider, near_q - far_q, near_q + far_q)
    both_halves = growth * (erf(y * ROOT_HALF) - erf(y_far * ROOT_HALF)) / 2
    return p, np.maximum(np.where(wider & (y >= 0), both_halves, q), 0)


def _mills(x: Floats) -> Floats:
    """exp(x²/2)·Pr(X > x) for a standard normal X; callers use it only for x >= 0."""
    return 0.5 * erfcx(ROOT_HALF * np.maximum(x, 0))


def _integrated(pair: Pair, edge: Floats) -> Floats:
    """delta / scale as the integral of p·(1 - e^(epsilon - loss)), whose integrand has no cancellation.

    Used where the loss hardly varies over the region, so 64 Gauss-Legendre nodes give full precision.
    """
    far, base = pair.far(edge), np.minimum(edge, 0)
    reach = np.sqrt(base * base + 90)  # beyond it lies less than 1e-18 of the mass
    low = np.where(pair.stretch > 0, np.maximum(far, -reach), -reach)
    near = _panel(pair, edge, base, low, np.minimum(edge, reach))
    return near + np.where(pair.stretch <= 0, _panel(pair, edge, base, np.minimum(far, reach), reach), 0)


def _panel(pair: Pair, edge: Floats, base: Floats, low: Floats, high: Floats) -> Floats:
    half = (high - low)[:, None] / 2
    x = (high + low)[:, None] / 2 + half * NODES
    # loss(x) - loss(edge), factored so that it is exact near the edge
    above = (x - edge[:, None]) * (pair.bend[:, None] * (x + edge[:, None]) - 2 * pair.shift[:, None])
    above = above / pair.std[:, None] / pair.std[:, None] / 2
    density = np.exp((base[:, None] ** 2 - x * x) / 2) / np.sqrt(2 * np.pi)
    total: Floats = (density * -np.expm1(-np.maximum(above, 0))) @ WEIGHTS
    return total * half[:, 0]
