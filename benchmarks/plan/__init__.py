"""What the planner says against what is measured or published."""
