"""Muon on shards takes the steps of whole matrices."""

from __future__ import annotations

import pytest

from drivetrain.testing import run_ranks
from tests.ranks.muon import distances, distances_with_wrong_owners


@pytest.mark.slow
@pytest.mark.long  # `make muon` writes the same down
@pytest.mark.timeout(300)
def test_shards_take_the_steps_of_whole_matrices() -> None:
    found = run_ranks(distances, 4, 250, args=(4,))[0]
    assert set(found) == {"fsdp", "hsdp", "fsdp × tp"}
    for name, (theirs, _, ours) in found.items():
        assert ours <= 1e-5, f"{name}: {ours:.1e}"
        assert theirs > 1e-2, f"{name}: torch's own would do by now ({theirs:.1e})"


def test_a_wrong_owner_shows() -> None:
    """What the test above is worth."""
    healthy, wrong = run_ranks(distances_with_wrong_owners, 2, 100)[0]
    assert healthy <= 1e-5
    assert wrong > 1e-2
