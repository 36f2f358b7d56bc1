"""Checks, one file per kind of exercise: run a learner's file, and report what is wrong."""
