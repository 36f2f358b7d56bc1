"""Which drills a campaign has, and that a host's clock can be set off. Drills themselves are run by
`make drills`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

from drivetrain.verify.drills.clock import SKEW_S
from drivetrain.verify.drills.faults import FOR_A_PERSON, ONE_HOST_ALL, TWO_HOSTS, Faults, draw
from tests.drills import campaign


def kinds_of(numbers: range) -> Counter[str]:
    faults = (campaign.faults_of(number, campaign.CASES[number % 8]) for number in numbers)
    return Counter(each.faults[0].kind for each in faults)


def test_a_campaign_of_300_has_every_kind_and_one_of_20_some_of_the_rare_ones() -> None:
    whole, short = kinds_of(range(300)), kinds_of(range(20))
    assert whole.keys() == {*ONE_HOST_ALL, *TWO_HOSTS}
    assert min(whole.values()) >= 10
    assert {"spoil_claim", "skew"} <= short.keys()


def test_what_is_for_a_person_is_drilled_where_one_command_is_the_run() -> None:
    assert not FOR_A_PERSON.keys() & set(TWO_HOSTS)


def test_a_skew_goes_either_way() -> None:
    drawn = {draw(seed, ["skew"], (1, 2), 2, 2).faults[0].skew_s for seed in range(20)}
    assert drawn == {-600.0, 600.0}
    assert Faults().skew(3, host=1).faults[0].skew_s == 600.0


def test_a_process_and_what_it_has_imported_before_are_given_a_wrong_clock() -> None:
    script = (
        "import time; from datetime import UTC, datetime\n"
        "import sys; here = sys.modules[__name__]; before = time.time(), time.monotonic()\n"
        "from drivetrain.verify.drills.clock import skew_as_told\n"
        "skew_as_told(); skew_as_told()\n"
        "off = time.time() - before[0], here.datetime.now(UTC).timestamp() - before[0]\n"
        "print(*map(round, (*off, time.monotonic() - before[1])))\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, SKEW_S: "-600"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said == "-600 -600 0\n"
