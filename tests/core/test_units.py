"""Bytes and lists of sizes, from and to text."""

from __future__ import annotations

import pytest

from memcheck.core.units import format_bytes, parse_bytes, parse_sizes, short_count


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", [8]),
        ("16, 32,16", [16, 32]),
        ("256:4096:x2", [256, 512, 1024, 2048, 4096]),
        ("3:100:x3", [3, 9, 27, 81]),
        ("100:500:+200", [100, 300, 500]),
        ("100:450:+200", [100, 300]),
        ("7:7:x2", [7]),
        ("1,8:16:x2", [1, 8, 16]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must look like 8, 16,32, 256:16384:x2 or 100:500:.100, got ''"),
        ("8,", "must look like"),
        ("8:16", "must look like"),
        ("8:16:2", "must look like"),
        ("8:16:x1.5", "must look like"),
        ("0", "must be at least 1"),
        ("-3", "must be at least 1"),
        ("9" * 30, r"below 2\^63"),
        ("16:8:x2", "must go up from its start to its stop"),
        ("8:16:x1", "must go up"),
        ("8:16:x0", "must be at least 1"),
        ("8:16:+0", "must be at least 1"),
        ("1:100000000000:+1", "must list at most 10000 sizes"),
    ],
)
def test_sizes_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7B", 7),
        ("40GiB", 40 << 30),
        ("1.5 kib", 1536),
        ("2MB", 2_000_000),
        ("3 GB", 3 * 10**9),
        ("1KB", 1000),
        ("9" * 400 + "B", int("9" * 400)),
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_number_without_a_unit_is_no_size() -> None:
    with pytest.raises(ValueError, match="40: 40 what\\? write 40GiB or 40B"):
        parse_bytes("40")


@pytest.mark.parametrize("text", ["", "GiB", "-1", "-1GiB", "4 TiBs", "1e3", "four"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="must look like"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (7, "7 B"),
        (1536, "1.5 KiB"),
        (1008 << 20, "1008 MiB"),
        (2_400_000, "2.29 MiB"),
        (40 << 30, "40 GiB"),
        (5 << 52, "20480 TiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_counts_in_short() -> None:
    numbers = (0, 9_999, 10_000, 163_037_184, 8_030_261_248)
    assert [*map(short_count, numbers)] == ["0", "9,999", "10.0K", "163M", "8.03B"]
