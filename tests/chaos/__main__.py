"""`make chaos`: run many schedules, and report how many held and how to repeat the others.

python -m tests.chaos                   200 schedules, six of them on Ray
python -m tests.chaos --seed 17         repeat one, with the output of its processes
python -m tests.chaos --on-ray --seed 3
python -m tests.chaos --seed 17 --show  print the schedule without running it
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.chaos.drive import Drive, Outcome
from tests.chaos.ray_drive import RayDrive
from tests.chaos.ray_schedule import RaySchedule, ray_schedule
from tests.chaos.schedule import schedule


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--on-ray", action="store_true", help="schedules on Ray only")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--schedules", type=int, default=200, help="how many, one in 33 of them on Ray")
    parser.add_argument("--at-a-time", type=int, default=2, help="how many of those that are not on Ray")
    parser.add_argument("--show", action="store_true", help="print the schedules and run nothing")
    arguments = parser.parse_args()
    first, count = (arguments.first, arguments.schedules) if arguments.seed is None else (arguments.seed, 1)
    on_ray = count if arguments.on_ray else count // 33
    ray_schedules = [ray_schedule(seed) for seed in range(first, first + on_ray)]
    schedules = [schedule(seed) for seed in range(first, first + count - on_ray)]
    if arguments.show:
        print(*schedules, *ray_schedules, sep="\n")
        return 0
    began_s = time.monotonic()
    outcomes: list[Outcome] = []
    folder = Path(tempfile.mkdtemp(prefix="headway-chaos-"))

    def take(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
        if arguments.seed is not None:
            print(outcome.schedule, *outcome.struck, *outcome.log, sep="\n")

    if schedules:
        drive = Drive(folder)
        with ThreadPoolExecutor(arguments.at_a_time) as pool:
            for done in as_completed([pool.submit(drive.run, each) for each in schedules]):
                take(done.result())
    if ray_schedules:
        with RayDrive(folder) as ray_drive:
            for each in ray_schedules:
                take(ray_drive.run(each))
    held = [each for each in outcomes if each.held]
    failed = [each for each in outcomes if each.complaints]
    print(
        f"\n{len(held)} of {len(outcomes)} schedules held; in {len(outcomes) - len(held) - len(failed)} nothing "
        f"struck; {sum(len(each.struck) for each in outcomes)} blows, {sum(each.torn for each in outcomes)} saves "
        f"or deletions torn, {time.monotonic() - began_s:.0f} s"
    )
    for outcome in failed:
        print(f"\ndid not hold; again: python -m tests.chaos{_options(outcome)}")
        print(outcome.schedule, *outcome.struck, *outcome.complaints, sep="\n")
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


def _line(outcome: Outcome) -> str:
    what = "held" if outcome.held else "DID NOT HOLD" if outcome.complaints else "nothing struck"
    return f"{_options(outcome):>20}  {outcome.seconds:5.1f} s  {len(outcome.struck)} blows  {what}"


def _options(outcome: Outcome) -> str:
    return f"{' --on-ray' * isinstance(outcome.schedule, RaySchedule)} --seed {outcome.schedule.seed}"


if __name__ == "__main__":
    sys.exit(main())
