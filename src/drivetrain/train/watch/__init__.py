"""What is measured, compared and said of each step while a run trains."""
