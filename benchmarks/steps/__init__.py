"""What a step costs: every arm in interleaved blocks of one run."""
