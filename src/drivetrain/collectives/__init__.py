"""Every collective, checked element by element and timed as the bare call that it is."""
