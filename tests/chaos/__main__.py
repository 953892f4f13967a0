"""`make chaos`: runs many schedules, says how many held, and how to repeat each that did not.

python -m tests.chaos                  200 schedules
python -m tests.chaos --seed 17        one of them again, with all that its processes printed
python -m tests.chaos --seed 17 --show what it would do, without doing it
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.chaos.drive import Drive, Outcome
from tests.chaos.schedule import schedule


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--at-a-time", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print the schedules and run nothing")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.schedules)
    if arguments.seed is not None:
        seeds = range(arguments.seed, arguments.seed + 1)
    if arguments.show:
        print(*(schedule(seed) for seed in seeds), sep="\n")
        return 0
    began_s = time.monotonic()
    outcomes: list[Outcome] = []
    folder = Path(tempfile.mkdtemp(prefix="headway-chaos-"))
    drive = Drive(folder)
    with ThreadPoolExecutor(arguments.at_a_time) as pool:
        for done in as_completed([pool.submit(drive.run, schedule(seed)) for seed in seeds]):
            outcomes.append(done.result())
            print(_line(outcomes[-1]), flush=True)
            if arguments.seed is not None:
                print(outcomes[-1].schedule, *outcomes[-1].struck, *outcomes[-1].log, sep="\n")
    held = [each for each in outcomes if each.held]
    failed = [each for each in outcomes if each.complaints]
    print(
        f"\n{len(held)} of {len(outcomes)} schedules held; in {len(outcomes) - len(held) - len(failed)} nothing "
        f"struck; {sum(len(each.struck) for each in outcomes)} blows, {sum(each.torn for each in outcomes)} saves "
        f"or deletions torn, {time.monotonic() - began_s:.0f} s"
    )
    for each in sorted(failed, key=lambda each: each.schedule.seed):
        print(f"\nseed {each.schedule.seed} did not hold; again: python -m tests.chaos --seed {each.schedule.seed}")
        print(each.schedule, *each.struck, *each.complaints, sep="\n")
    return 1 if failed else 0


def _line(outcome: Outcome) -> str:
    what = "held" if outcome.held else "DID NOT HOLD" if outcome.complaints else "nothing struck"
    return f"seed {outcome.schedule.seed:4d}  {outcome.seconds:5.1f} s  {len(outcome.struck)} blows  {what}"


if __name__ == "__main__":
    sys.exit(main())
