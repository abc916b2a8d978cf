"""Pull of 64 MiB over loopback against a memory copy: `python tests/bench/bench_transfer.py [MIB] [REPEATS]`.

Prints medians: GB/s of the transfer, of transfer and digest, of memcpy, and their times as multiples of memcpy's.
"""

from __future__ import annotations

import sys

from gyre.transfer.doctor import loopback_check


def main(mebibytes: int = 64, repeats: int = 11) -> None:
    report = loopback_check(nbytes=mebibytes << 20, repeats=repeats)
    print(f"{mebibytes} MiB over {report.protocol}, medians of {repeats}")
    for name, speed in (
        ("memcpy", report.memcpy),
        ("transfer", report.transfer),
        ("transfer + digest", report.verified),
    ):
        print(f"{name:18} {speed:6.2f} GB/s  {report.memcpy / speed:5.1f} x memcpy's time")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
