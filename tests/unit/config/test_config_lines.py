"""Keys are found on the line where they stand."""

from typing import Any

import tomli
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.config_values import TEXT, toml_values
from torchtitan_diloco.config.toml_lines import key_lines

LENIENT = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

LINES = '''\
# comment with [brackets] and "quotes
top.a.b = 1 # x = 2
"quoted \\u0041" = """
[no.header]
fake = 1 \\""" ""\\"
"""
[sec]
'lit.eral' = \'\'\'
[[no]]
\'\'\'
list = [ # [
  "a]", # ]
  [1,
   2],
  {k = "#", m = [
    3]},
]
[[arr]]
x = 1979-05-27 07:32:00
[arr.sub]
y = {p.q = 1, r = "}"}
[[arr]]
[[arr.inner]]
z = ""
[[arr.inner]]
z = \'\'\'\'quoted\'\'\'\'
'''


def test_lines_of_every_kind_of_key() -> None:
    tomli.loads(LINES)
    lines = key_lines(LINES)
    expected = {
        ("top", "a", "b"): 2,
        ("quoted A",): 3,
        ("sec",): 7,
        ("sec", "lit.eral"): 8,
        ("sec", "list"): 11,
        ("sec", "list", 0): 12,
        ("sec", "list", 1): 13,
        ("sec", "list", 1, 1): 14,
        ("sec", "list", 2, "k"): 15,
        ("sec", "list", 2, "m", 0): 16,
        ("arr", 0): 18,
        ("arr", 0, "x"): 19,
        ("arr", 0, "sub"): 20,
        ("arr", 0, "sub", "y", "p", "q"): 21,
        ("arr", 0, "sub", "y", "r"): 21,
        ("arr", 1): 22,
        ("arr", 1, "inner", 0): 23,
        ("arr", 1, "inner", 0, "z"): 24,
        ("arr", 1, "inner", 1, "z"): 26,
    }
    assert {k: lines.get(k) for k in expected} == expected
    assert ("no",) not in lines and ("fake",) not in lines


@LENIENT
@given(document=st.dictionaries(TEXT, toml_values, max_size=6), multiline=st.booleans())
def test_every_key_of_any_document_has_a_line_within_it(document: dict[str, Any], multiline: bool) -> None:
    text = tomli_w.dumps(document, multiline_strings=multiline)
    lines = key_lines(text)

    def check(node: Any, path: tuple[str | int, ...]) -> None:
        entries = (
            node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        )
        for key, child in entries:
            assert 1 <= lines[(*path, key)] <= text.count("\n") + 1
            check(child, (*path, key))

    check(tomli.loads(text), ())
    scalars = {k: v for k, v in document.items() if not isinstance(v, dict | list)}
    for key in scalars:
        written = text.split("\n")[lines[(key,)] - 1].partition(" = ")[0]
        assert tomli.loads(f"{written} = 0") == {key: 0}
