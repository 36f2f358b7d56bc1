"""`python -m tests.pages.labs`: the labs' solutions, written into their pages."""

from __future__ import annotations

import re
from pathlib import Path

from drivetrain.learn.exercises import LABS, Exercise

PAGES = Path(__file__).parents[2] / "docs" / "labs"


def with_solution(page: str, lab: Exercise) -> str:
    """The block after the heading, which is all of the file."""
    block = f"## The solution, explained\n\n```py\n{lab.solution.read_text()}```\n"
    pattern = r"## The solution, explained\n\n```py\n.*?```\n"
    return re.sub(pattern, lambda _: block, page, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    for path, lab in zip(sorted(PAGES.glob("[1-4]*.md")), LABS, strict=True):
        path.write_text(with_solution(path.read_text(), lab))
        print(path.name)
