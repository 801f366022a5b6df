"""Sizes, names and operators, as messages say them."""

from __future__ import annotations

from capture.rules._rule import accelerators, bytes_text, names_text, short_op


def test_texts() -> None:
    assert [bytes_text(size) for size in (0, 999, 1000, 8_388_608, 999_960_000, 3 * 10**12)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "8.4 MB",
        "1.0 GB",
        "3.0 TB",
    ]
    assert [names_text(list(text)) for text in ("", "a", "ab", "abc", "abcde")] == [
        "",
        "'a'",
        "'a' and 'b'",
        "'a', 'b' and 'c'",
        "'a', 'b', 'c' and 2 more",
    ]
    assert [short_op(op) for op in ("aten.mul.Tensor", "aten::mul.Tensor", "Tensor.tolist", "tolist")] == [
        "mul",
        "mul",
        "tolist",
        "tolist",
    ]
    assert accelerators(("cuda:1", "cpu", "meta", "cuda:0", "cuda:1")) == ("cuda:0", "cuda:1")
