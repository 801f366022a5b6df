"""Sizes, names and operators, as messages say them."""

from __future__ import annotations

from capture.rules._rule import accelerators, names_text, short_op


def test_texts() -> None:
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
