"""Standard errors of measured times, and ties."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashtune.core.record import Measurement

# In a normal distribution the 20th and 80th percentiles differ by 1.683 standard deviations. The standard
# error of a median is 1.253 standard deviations over the root of the number of samples.
ERROR_OF_MEDIAN = 1.253 / 1.683
# Two medians count as different if they differ by this many standard errors of their difference.
CONFIDENCE = 2.0
# Resolution of the GPU's event timer, in ms.
TIMER_STEP = 0.0005


def is_tied(time: Measurement, fastest: Measurement) -> bool:
    """Returns whether a time differs from the fastest one by no more than noise."""
    noise = math.hypot(standard_error(time), standard_error(fastest))
    margin = TIMER_STEP + CONFIDENCE * noise if fastest.samples else 0.0
    return time.ms - fastest.ms <= margin


def standard_error(measurement: Measurement) -> float:
    """Returns the standard error of a measurement's median, in ms."""
    if measurement.samples == 0:
        return 0.0
    return ERROR_OF_MEDIAN * (measurement.p80 - measurement.p20) / math.sqrt(measurement.samples)
