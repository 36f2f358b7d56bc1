"""One file or folder per target: where a run can be launched."""
