"""What the first person with a GPU runs: `make gpu-smoke`, ten minutes, one report.

    python -m tests.gpu_smoke build/gpu-smoke.md [CHECK …]

`catalogue` lists the checks, `checks/` has them, `runner` runs each in processes of its own with a
time limit, `budget` keeps to ten minutes in all, `report` writes Markdown for an issue. Any
accelerator that torch knows will do; the test accelerator (tests/accelerator) is one.
"""
