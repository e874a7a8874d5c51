"""benchmarks/gpu_suite/linear.py on the CPU, with the product spelt out."""

from __future__ import annotations

import json

import pytest

from gpu_suite.linear import main


def test_each_shape_and_number_of_rows_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--shapes", "32x64,40x16", "--rows", "1,3"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["shape"], line["rows"]) for line in lines] == [("32x64", 1), ("32x64", 3), ("40x16", 1), ("40x16", 3)]
    for line in lines:
        assert set(line["milliseconds"]) == {"bfloat16", "int8 spelt out"}
