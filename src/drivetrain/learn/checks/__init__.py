"""One file per kind of exercise: what is asked of a learner's file, and how it is told."""
