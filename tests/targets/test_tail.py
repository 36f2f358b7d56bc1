from __future__ import annotations

from pathlib import Path

from drivetrain.launch.tail import tail


def test_what_grows_is_read_to_its_end_letter_by_letter(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.write_bytes("ä".encode()[:1])
    looks = 0

    def paths() -> list[Path]:
        nonlocal looks
        looks += 1
        if looks == 2:
            first.write_bytes("äb".encode())
        if looks == 3:
            second.write_text("c")
        return [first, second]

    def is_over() -> bool:
        assert looks > 3
        with second.open("a") as file:  # between the last look and the question
            file.write("d")
        return True

    assert "".join(tail(paths, is_over, follow=True)) == "äbcd"
    assert "".join(tail(paths, lambda: False, follow=False)) == "äbcd"
