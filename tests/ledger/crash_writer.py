"""A process that writes to a ledger as fast as it can, until it is killed or the disk is full.

Prints `<journal lines> <turns> <micro-steps>` after each round: what was acknowledged. Run as
`python crash_writer.py RUN`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gyre.ledger.events import Started
from gyre.ledger.files import LedgerWriteError
from gyre.ledger.journal import Journal
from gyre.ledger.layout import RunFolder
from gyre.ledger.microstep_files import write_microstep
from gyre.ledger.shards import TurnWriter

sys.path.insert(0, str(Path(__file__).parent))
from samples import microstep, turn


def main() -> None:
    run = RunFolder(Path(sys.argv[1]))
    journal = Journal.open(run, "w", time.time)
    writer = TurnWriter(run, "w", journal.incarnation, max_rows=7)
    i = 0
    while True:
        journal.append(Started(execution=f"g{journal.incarnation}", attempt=i))
        writer.append(turn(i, tokens=500))
        write_microstep(run.microstep_dir(1) / f"{journal.incarnation}-{i:05d}.arrow", microstep(i, tokens=500))
        i += 1
        print(i, flush=True)


if __name__ == "__main__":
    try:
        main()
    except LedgerWriteError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
