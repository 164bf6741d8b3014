"""Patterns match as the shell's help says, words keep their escapes, names lead back to keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.shell.paths import (
    UnclosedQuoteError,
    absolute,
    compile_component,
    escape,
    split_words,
    unescape,
)
from streammeta.shell.tree import name_of, text_of


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("abc", ["abc"], ["ab", "abcd"]),
        ("a?c", ["abc", "a?c"], ["ac", "abbc"]),
        ("a*", ["a", "abc"], ["ba"]),
        ("*", ["", "abc"], []),
        ("{ab,cd}e", ["abe", "cde"], ["e", "abcde"]),
        ("{a*,?b}", ["axx", "xb"], ["xbb"]),
        ("{,a}b", ["b", "ab"], ["aab"]),
        (r"a\*b", ["a*b"], ["axb", r"a\*b"]),
        (r"\{a,b\}", ["{a,b}"], ["a", "b"]),
        (r"{a\,b,c}", ["a,b", "c"], ["a", "b"]),
        ("a[bc]", ["a[bc]"], ["ab"]),
        ("a.c", ["a.c"], ["abc"]),
        ("{a,{b,c}}", ["{a,{b,c}}"], ["a", "b"]),
        ("{a,b", ["{a,b"], ["a", "b"]),
        ("a}", ["a}"], ["a"]),
        ("a,b", ["a,b"], ["a"]),
        ("\\", ["\\"], [""]),
        ("*\\", ["a\\"], ["a"]),
    ],
)
def test_pattern_matches_what_it_should(
    pattern: str, matching: list[str], other: list[str]
) -> None:
    compiled = compile_component(pattern)

    assert [name for name in matching if not compiled.matches(name)] == []
    assert [name for name in other if compiled.matches(name)] == []


@given(st.text())
def test_escaped_name_is_literal_and_matches_itself(name: str) -> None:
    compiled = compile_component(escape(name))

    assert name == compiled.literal
    assert name == unescape(escape(name))
    assert compiled.matches(name)


@given(st.text(alphabet="ab*?{},\\", max_size=8), st.text(alphabet="ab*", max_size=8))
def test_every_match_begins_with_the_prefix(pattern: str, name: str) -> None:
    compiled = compile_component(pattern)

    assert not compiled.matches(name) or name.startswith(compiled.prefix)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("  ls   /a  ", ["ls", "/a"]),
        ("cat 'a b' c", ["cat", r"a\ b", "c"]),
        ('cat "*"x', ["cat", r"\*x"]),
        ("cat ''", ["cat", ""]),
        (r"cat a\ b", ["cat", r"a\ b"]),
        (r"cat a\*b", ["cat", r"a\*b"]),
        ("cat a\\", ["cat", "a\\"]),
        (r"cat \'x", ["cat", r"\'x"]),
    ],
)
def test_line_is_split_into_patterns(line: str, words: list[str]) -> None:
    assert words == split_words(line)


def test_unclosed_quote_is_an_error() -> None:
    with pytest.raises(UnclosedQuoteError, match='the quote " is never closed'):
        split_words('ls "a')


@pytest.mark.parametrize(
    ("here", "word", "path"),
    [
        (("a",), "b", ("a", "b")),
        (("a",), "/b//c/", ("b", "c")),
        (("a", "b"), "../c/.", ("a", "c")),
        ((), "../..", ()),
        (("a*b",), "c", (r"a\*b", "c")),
    ],
)
def test_word_is_relative_to_the_current_directory(
    here: tuple[str, ...], word: str, path: tuple[str, ...]
) -> None:
    assert path == absolute(here, word)


@given(st.text(min_size=1, alphabet=st.characters(exclude_categories=["Cs"])))
def test_name_of_any_key_leads_back_to_it(key: str) -> None:
    name = name_of(key)

    assert key == text_of(name)
    assert "/" not in name
    assert name not in {"", ".", ".."}
    assert name.isprintable()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("__automq_node/1", "__automq_node%2F1"),
        ("50%", "50%25"),
        ("..", "%2E%2E"),
        ("主题", "主题"),
    ],
)
def test_name_of_key(key: str, name: str) -> None:
    assert name == name_of(key)


@pytest.mark.parametrize("name", ["a%2f", "a%41", "%", "%FF"])
def test_text_of_refuses_names_that_no_key_has(name: str) -> None:
    assert text_of(name) is None
