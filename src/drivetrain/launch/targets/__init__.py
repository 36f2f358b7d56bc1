"""The targets on which a run can be launched, one file or directory each."""
