"""Prices learned from durations, one measurement after the other.

A step's duration is a function of prices that are 0 or more. An extended Kalman filter keeps their
means and their covariance, and works with relative errors. A measurement moves each price by its
share of the duration, as far as the price is uncertain. An error counts up to `_CLIP` standard
deviations, so one fast or slow step, as on a busy machine, moves the prices little. Between
measurements the uncertainty grows: most of all in the direction in which all prices change by the
same factor, since other work on the machine does that. So relations of prices are steady.
"""

from __future__ import annotations

import math

import numpy as np

_NOISE = 0.15  # standard deviation of a measurement, relative
_FIRST_NOISE = 0.5  # further noise of the first measurement; falls with their number
_CLIP, _MAX_ERROR = 2.0, 0.7  # error that counts in full: in standard deviations; relative
_COMMON_DRIFT, _OWN_DRIFT = 6e-3, 1e-3  # relative changes from one measurement to the next
_MIN_S = 1e-12
_SOLVABLE = 1e-9  # least part of a variance that other prices cannot explain


class RobustFit:
    """`prices`, float64 [n], with a covariance that starts from the standard deviations `spread`.
    A price stays between 0 (or `lowest`) and `highest`. `is_seconds` marks prices in seconds; other
    parameters do not follow the speed of the machine."""

    def __init__(
        self,
        prices: np.ndarray,
        spread: np.ndarray,
        *,
        common: float,
        drifts: bool = True,
        lowest: np.ndarray | float = 0.0,
        highest: np.ndarray | float = math.inf,
        is_seconds: np.ndarray | float = 1.0,
    ) -> None:
        """`common`: relative standard deviation of all prices together."""
        self.prices, self._first_spread = prices.astype(np.float64), spread.astype(np.float64)
        # As arrays, because numpy converts a Python number in each operation.
        self._lowest, self._highest = np.asarray(lowest), np.asarray(highest)
        self._is_seconds = is_seconds
        self._drifts, self._num_observed = drifts, 0
        moving = self.prices * is_seconds
        self._covariance = np.diag(spread**2) + common**2 * np.outer(moving, moving)

    def observe(self, seconds: float, expected_s: float, gradient: np.ndarray) -> None:
        """Observe a duration. `gradient` has the derivative of `expected_s` by each price."""
        self._num_observed += 1
        share = gradient / max(expected_s, _MIN_S)
        gain = self._covariance @ share
        first = _FIRST_NOISE / self._num_observed
        variance = float(share @ gain) + _NOISE**2 + first**2
        error = math.log(max(seconds, _MIN_S) / max(expected_s, _MIN_S))
        # A step that is far off says little: less than its error counts, and less is learned.
        variance *= max(abs(error) / min(_CLIP * math.sqrt(variance), _MAX_ERROR), 1.0)
        prices = self.prices + gain * (error / variance)
        self._covariance -= np.multiply.outer(gain, gain) / variance
        self.prices = self._within_bounds(prices)
        if self._drifts:
            moving = self.prices * self._is_seconds
            self._covariance += np.multiply.outer(_COMMON_DRIFT**2 * moving, moving)
            diagonal = self._covariance.reshape(-1)[:: len(prices) + 1]  # a view
            diagonal += (_OWN_DRIFT * self._first_spread) ** 2

    def _within_bounds(self, prices: np.ndarray) -> np.ndarray:
        """Return the most likely prices within the bounds. Each price outside is set to its bound;
        the others change as they do with it, given those that are at their bounds already."""
        within: np.ndarray = np.minimum(np.maximum(prices, self._lowest), self._highest)
        outside = (within != prices).nonzero()[0]
        if not len(outside):
            return within
        at_bound, covariance = np.zeros(len(prices), np.bool_), self._covariance.copy()
        while len(outside):
            i = outside[0]
            at_bound[i], bound = True, within[i]
            variance = max(covariance[i, i], _SOLVABLE * self._covariance[i, i], _MIN_S**2)
            shares = covariance[i] / variance
            prices = prices + shares * (bound - prices[i])
            covariance -= np.multiply.outer(shares, covariance[i])
            prices[i] = bound
            within = np.minimum(np.maximum(prices, self._lowest), self._highest)
            outside = ((within != prices) & ~at_bound).nonzero()[0]
        return within

    def variance(self, shares: np.ndarray) -> float:
        """Return the variance of the logarithm of a duration with these shares of prices, relative
        to the prices, float64 [n]."""
        return max(float(shares @ self._covariance @ shares), 0.0)
