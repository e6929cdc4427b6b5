"""Printed numbers of the paper that serve as inputs or expected outputs; the tables keep its row order."""

from __future__ import annotations

from typing import NamedTuple


class ValidationRow(NamedTuple):
    """A row of Table S8. Seconds; ratios; the channel difference; savings in percent. replicate 0: the sum."""

    measurement: str
    n: int
    changed: str
    replicate: int
    baseline_a: float
    changed_a: float
    ratio_a: float
    ratio_b: float
    difference: float
    saving_a: float
    saving_b: float


_S8 = """
initial 6 slots 1 7.696 7.694 0.9998 0.9683 0.0315 +0.02 +3.17
initial 6 slots 2 6.785 6.563 0.9672 0.9699 0.0027 +3.28 +3.01
initial 6 slots 3 8.503 8.252 0.9705 0.9419 0.0286 +2.95 +5.81
initial 6 slots 0 22.984 22.508 0.9793 0.9588 0.0205 +2.07 +4.12
initial 6 grid 1 7.696 7.528 0.9782 0.9515 0.0267 +2.18 +4.85
initial 6 grid 2 6.785 6.542 0.9642 0.9573 0.0069 +3.58 +4.27
initial 6 grid 3 8.503 8.131 0.9562 0.9228 0.0334 +4.38 +7.72
initial 6 grid 0 22.984 22.201 0.9660 0.9424 0.0236 +3.40 +5.76
initial 8 slots 1 13.441 12.697 0.9446 0.9334 0.0112 +5.54 +6.66
initial 8 slots 2 10.920 10.009 0.9166 0.9256 0.0090 +8.34 +7.44
initial 8 slots 3 7.836 6.835 0.8723 0.8817 0.0094 +12.77 +11.83
initial 8 slots 0 32.197 29.541 0.9175 0.9183 0.0008 +8.25 +8.17
initial 8 grid 1 13.441 12.446 0.9259 0.9098 0.0162 +7.41 +9.02
initial 8 grid 2 10.920 9.876 0.9044 0.9095 0.0052 +9.56 +9.05
initial 8 grid 3 7.836 6.747 0.8611 0.8669 0.0058 +13.89 +13.31
initial 8 grid 0 32.197 29.069 0.9028 0.8993 0.0035 +9.72 +10.07
initial 10 slots 1 12.949 12.217 0.9434 0.9487 0.0053 +5.66 +5.13
initial 10 slots 2 13.575 12.979 0.9560 0.9509 0.0051 +4.40 +4.91
initial 10 slots 3 13.516 13.050 0.9655 0.9656 0.0000 +3.45 +3.44
initial 10 slots 0 40.040 38.245 0.9552 0.9551 0.0000 +4.48 +4.49
initial 10 grid 1 12.949 11.438 0.8833 0.8804 0.0029 +11.67 +11.96
initial 10 grid 2 13.575 12.911 0.9511 0.9542 0.0031 +4.89 +4.58
initial 10 grid 3 13.516 12.742 0.9428 0.9500 0.0072 +5.72 +5.00
initial 10 grid 0 40.040 37.091 0.9264 0.9287 0.0023 +7.36 +7.13
new 6 slots 1 9.790 9.614 0.9821 0.9838 0.0017 +1.79 +1.62
new 6 slots 2 8.396 8.417 1.0024 0.9991 0.0033 -0.24 +0.09
new 6 slots 3 7.923 7.923 1.0000 1.0011 0.0011 +0.00 -0.11
new 6 slots 0 26.110 25.954 0.9941 0.9940 0.0001 +0.59 +0.60
new 6 grid 1 9.790 9.561 0.9766 0.9687 0.0080 +2.34 +3.13
new 6 grid 2 8.396 8.258 0.9835 0.9748 0.0087 +1.65 +2.52
new 6 grid 3 7.923 7.739 0.9767 0.9752 0.0015 +2.33 +2.48
new 6 grid 0 26.110 25.558 0.9789 0.9726 0.0063 +2.11 +2.74
"""


def _row(line: str) -> ValidationRow:
    measurement, n, changed, replicate, *numbers = line.split()
    return ValidationRow(measurement, int(n), changed, int(replicate), *map(float, numbers))


TABLE_S8 = [_row(line) for line in _S8.strip().splitlines()]

# Table "Time by cost channel for the baseline configuration": channel A, channel B, r (s).
BASELINES = {
    ("initial", 6): (22.984, 24.469, 1.485),
    ("initial", 8): (32.197, 33.441, 1.244),
    ("initial", 10): (40.040, 41.728, 1.688),
    ("new", 6): (26.110, 27.131, 1.022),
}

# Table "Prediction results": predicted ratio, printed error e, decision.
PREDICTIONS = {
    ("initial", 6, "slots"): (0.9610, 0.0183, "WITHHELD"),
    ("initial", 6, "grid"): (0.9466, 0.0194, "WITHHELD"),
    ("initial", 8, "slots"): (0.9101, 0.0074, "PASS"),
    ("initial", 8, "grid"): (0.8971, 0.0058, "PASS"),
    ("new", 6, "slots"): (0.9874, 0.0066, "PASS"),
    ("new", 6, "grid"): (0.9713, 0.0076, "PASS"),
    ("initial", 10, "slots"): (0.9213, 0.0339, "NOT SUBJECT"),
    ("initial", 10, "grid"): (0.8899, 0.0364, "NOT SUBJECT"),
}

# Table S2: bucket -> artifact -> model p50 of five sessions, ms.
SESSIONS_MS = {
    1: {
        "a1": (9.51, 9.49, 9.60, 9.50, 9.52),
        "a2": (9.53, 9.49, 9.49, 9.60, 9.47),
        "a3": (9.54, 9.53, 9.56, 9.56, 9.77),
    },
    2: {
        "a1": (10.01, 10.01, 10.11, 10.07, 10.07),
        "a2": (10.12, 9.94, 10.06, 9.99, 10.09),
        "a3": (10.05, 10.06, 10.13, 10.04, 10.03),
    },
    4: {
        "a1": (10.38, 10.32, 10.37, 10.27, 10.34),
        "a2": (10.32, 10.32, 10.47, 10.31, 10.32),
        "a3": (10.39, 10.70, 10.31, 10.30, 10.36),
    },
    8: {
        "a1": (12.32, 12.38, 12.33, 12.35, 12.38),
        "a2": (12.40, 12.42, 12.41, 12.44, 12.46),
        "a3": (12.33, 12.36, 12.38, 12.38, 12.39),
    },
}
# bucket -> (medians of a1, a2, a3; null median, q95, max), as printed.
TABLE_S2 = {
    1: (("9.51", "9.49", "9.56"), ("0.04", "0.22", "0.24")),
    2: (("10.07", "10.06", "10.05"), ("0.06", "0.14", "0.18")),
    4: (("10.34", "10.32", "10.36"), ("0.05", "0.37", "0.40")),
    8: (("12.35", "12.42", "12.38"), ("0.03", "0.06", "0.06")),
}
# (artifacts, bucket) -> (difference, class).
TABLE_S3 = {
    ("a1", "a3", 1): ("0.05", "WITHIN"),
    ("a1", "a3", 2): ("0.02", "WITHIN"),
    ("a1", "a3", 4): ("0.02", "WITHIN"),
    ("a1", "a3", 8): ("0.03", "WITHIN"),
    ("a1", "a2", 1): ("0.02", "WITHIN"),
    ("a1", "a2", 2): ("0.01", "WITHIN"),
    ("a1", "a2", 4): ("0.02", "WITHIN"),
    ("a1", "a2", 8): ("0.07", "OUTSIDE"),
    ("a2", "a3", 1): ("0.07", "WITHIN"),
    ("a2", "a3", 2): ("0.01", "WITHIN"),
    ("a2", "a3", 4): ("0.04", "WITHIN"),
    ("a2", "a3", 8): ("0.04", "WITHIN"),
}

# Table S5: R, p_A, p_C, delta p of the six blocks at N = 7; Table S6: pooled R and delta p.
TABLE_S5 = (
    (0.9928, 0.1687, 0.1627, -0.0060),
    (1.0229, 0.1656, 0.1843, +0.0187),
    (1.0481, 0.1236, 0.1638, +0.0402),
    (0.9922, 0.2180, 0.2118, -0.0062),
    (1.1032, 0.1323, 0.2135, +0.0811),
    (1.0140, 0.1252, 0.1373, +0.0121),
)

# Table S9: N -> replicate -> channel A ratios at 16, 24, 32 slots; Table XIII: the ratios of sums.
TABLE_S9 = {
    6: ((0.9633, 0.9636, 0.9632), (0.9847, 0.9845, 0.9848), (0.9452, 0.9452, 0.9466)),
    8: ((0.9062, 0.9061, 0.9086), (0.9548, 0.9548, 0.9548), (0.8819, 0.8819, 0.8828)),
    10: ((0.8211, 0.8208, 0.8208), (0.8428, 0.8261, 0.8260), (0.9072, 0.8898, 0.8905)),
}
