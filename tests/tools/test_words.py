"""tools/words.py: which texts count, and where their sentences end."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = runpy.run_path(str(ROOT / "tools" / "words.py"))

PAGE = """# A title

One sentence of `some.code()` here. Another
one, on two lines.

* An item.
* [A link](to/what.md), a second item.

```python
what = "code does not count"
```

| head | what |
|---|---|
| a cell | `x | y` |
"""

DOCSTRING = """Return a value.

before   %what = sin(%x)
after    %y = cos(%x)

Args:
    name: The name. It may be
        long.
    other: Another one.

Example:
    >>> what(1)
"""


def test_texts_of_a_page_are_its_prose(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text(PAGE)
    texts_of_page = WORDS["texts_of_page"]
    monkeypatch.setitem(texts_of_page.__globals__, "ROOT", tmp_path)
    texts = [text.words for text in texts_of_page(tmp_path / "page.md")]
    assert texts == [
        "A title",
        "One sentence of `some.code()` here. Another one, on two lines.",
        "An item.",
        "[A link](to/what.md), a second item.",
        " head ".strip(),
        "what",
        "a cell",
        "`x",
        "y`",
    ]


def test_texts_of_a_docstring_leave_out_programs_and_examples():
    texts = [text.words for text in WORDS["texts_of_docstring"]("file:1", DOCSTRING)]
    assert texts == ["Return a value.", "name: The name. It may be long.", "other: Another one."]


def test_a_sentence_ends_with_a_stop_that_no_code_or_number_holds():
    text = "It takes 1.5 s (see a. B there). `x. Y` is code. name: an entry. Is it? Yes."
    assert len(WORDS["sentences"](text)) == 5
    assert WORDS["words_of"]("a [long label](link.md) and `code of x`") == [
        *"a long label and code".split()
    ]
