"""Measuring, checking and reporting steps while a run trains."""
