"""Commands over a tree of dicts, and patterns: what they show and match, without a terminal."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammeta.shell import paths
from streammeta.shell.commands import COMMANDS, execute
from streammeta.shell.events import Event, Left, Moved, Problem, columns, json_value, text_lines
from streammeta.shell.prompt import SUGGESTIONS_MAX, suggestions
from streammeta.shell.state import ShellState
from streammeta.shell.tree import Child, Directory, Document, File, Node, name_of, text_of


def state_in(*here: str) -> ShellState:
    return ShellState(DictDirectory(SAMPLE), here)


def run(line: str, *here: str) -> list[Event]:
    return list(execute(state_in(*here), paths.split_words(line)))


def shown(line: str, *here: str) -> list[str]:
    return list(text_lines(run(line, *here)))


def problems(line: str) -> list[tuple[str, str]]:
    return [(event.message, event.hint) for event in run(line) if isinstance(event, Problem)]


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("", []),
        ("ls", ["cluster", "empty/", "nodes/", "odd/", "streams/"]),
        ("ls /empty", []),
        ("ls streams", ["3", "4", "12"]),
        ("ls /streams/3", ["/streams/3"]),
        ("ls /streams/{3,4}", ["/streams/3", "/streams/4"]),
        ("ls cluster nodes/2", ["/cluster", "", "/nodes/2:", "info"]),
        ("ls /nodes/*", ["/nodes/1:", "info", "sets/", "", "/nodes/2:", "info"]),
        ("cat streams/3", ["value: three"]),
        ("cat /nodes/1", ["value: first"]),
        (
            "cat /streams/{3,12}",
            ["/streams/3:", "value: three", "", "/streams/12:", "value: twelve"],
        ),
        (r"cat /odd/a\*b", ["value: star"]),
        ("cat '/odd/a b'", ["value: blank"]),
        ("tree /nodes/2", ["/nodes/2:", "  info:", "    value: second"]),
        ("find nodes/2 cluster", ["/nodes/2", "/nodes/2/info", "/cluster"]),
        ("find /nodes/1/../2/.", ["/nodes/2", "/nodes/2/info"]),
        ("pwd", ["/"]),
    ],
)
def test_command_shows(line: str, lines: list[str]) -> None:
    assert lines == shown(line)
    assert problems(line) == []


def test_commands_work_from_the_current_directory() -> None:
    assert shown("ls", "nodes", "1") == ["info", "sets/"]
    assert shown("cat ../2/info", "nodes", "1") == ["value: second"]
    assert shown("pwd", "nodes", "1") == ["/nodes/1"]


@pytest.mark.parametrize("command", ["ls", "cat", "tree", "find", "cd"])
@pytest.mark.parametrize("path", ["/x", "/streams/9", "/cluster/below", "/odd/q*"])
def test_unknown_path_is_named(command: str, path: str) -> None:
    [(message, hint)] = problems(f"{command} {path}")

    assert message == f"{command}: {path}: no such file or directory"
    assert hint.startswith("list the directory with `ls /")


def test_one_missing_path_does_not_hide_the_others() -> None:
    assert shown("ls /x /streams") == ["3", "4", "12"]
    assert len(problems("ls /x /streams")) == 1


def test_file_that_vanished_is_missing_in_cat_and_left_out_of_tree() -> None:
    assert problems("cat /odd/gone")[0][0] == "cat: /odd/gone: no such file or directory"
    assert not any("gone" in line for line in shown("tree /odd"))


def test_cat_of_a_directory_says_what_to_do() -> None:
    [(message, hint)] = problems("cat /streams")

    assert message == "cat: /streams: is a directory"
    assert "`ls /streams`" in hint


@pytest.mark.parametrize(
    ("line", "name", "hint"),
    [
        ("lss /", "lss", "did you mean `ls`?"),
        ("hlep", "hlep", "did you mean `help`?"),
        ("frobnicate", "frobnicate", "`help` lists the commands"),
        ("help tre", "tre", "did you mean `tree`?"),
    ],
)
def test_unknown_command_gets_a_hint(line: str, name: str, hint: str) -> None:
    [(message, given_hint)] = problems(line)

    assert message == f"{name}: unknown command"
    assert hint == given_hint


@pytest.mark.parametrize(
    ("line", "usage"),
    [
        ("cat", "usage: cat PATH..."),
        ("cd a b", "usage: cd [PATH]"),
        ("pwd x", "usage: pwd"),
        ("history x", "try `history 10`"),
    ],
)
def test_wrong_arguments_get_the_usage(line: str, usage: str) -> None:
    assert usage == problems(line)[0][1]


@pytest.mark.parametrize(
    ("line", "path"),
    [("cd", ()), ("cd nodes/1", ("nodes", "1")), ("cd /str*", ("streams",)), ("cd ..", ())],
)
def test_cd_moves(line: str, path: tuple[str, ...]) -> None:
    assert [Moved(path)] == run(line)


def test_cd_refuses_files_and_several_directories() -> None:
    assert problems("cd /cluster")[0][0] == "cd: /cluster: not a directory"
    assert problems("cd /nodes/*")[0][0] == "cd: /nodes/*: matches /nodes/1 and /nodes/2"


def test_history_counts_from_the_oldest_line() -> None:
    state = ShellState(DictDirectory({}), history=("ls", "pwd", "history 2"))

    assert list(text_lines(execute(state, ["history", "2"]))) == ["    2  pwd", "    3  history 2"]
    assert len(list(execute(state, ["history"]))) == 3


def test_help_explains_every_command() -> None:
    text = "\n".join(shown("help"))

    for name, command in COMMANDS.items():
        assert command.usage in text
        assert shown(f"help {name}")[2] == f"usage: {command.usage}"


def test_exit_leaves() -> None:
    assert [Left()] == run("exit")


def test_listing_goes_no_further_than_it_is_read() -> None:
    """A directory of any size costs what is looked at."""
    root = DictDirectory({str(number): "x" for number in range(100_000)})

    assert len(list(islice(execute(ShellState(root), ["ls"]), 10))) == 10
    assert root.listed_count <= 11


def test_json_holds_paths_and_documents() -> None:
    assert json_value(run("ls /nodes/2")) == {
        "entries": [{"path": "/nodes/2/info", "directory": False}],
        "documents": [],
        "text": [],
    }
    documents = json_value(run("tree /nodes/2"))["documents"]
    assert documents == [{"path": "/nodes/2/info", "value": "second"}]


@pytest.mark.parametrize(
    ("width", "lines"),
    [(1, ["a", "bb", "c"]), (6, ["a   c", "bb"]), (80, ["a   bb  c"])],
)
def test_columns_fill_downward(width: int, lines: list[str]) -> None:
    assert lines == list(columns(["a", "bb", "c"], width))


def test_long_listing_in_columns_loses_nothing() -> None:
    root = DictDirectory({f"{number:05}": "x" for number in range(2501)})

    lines = list(text_lines(execute(ShellState(root), ["ls"]), width=80))

    assert sorted(root.content) == sorted(word for line in lines for word in line.split())


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("", list(COMMANDS)),
        ("c", ["cd", "cat"]),
        ("help c", ["cd", "cat"]),
        ("ls /n", ["nodes/"]),
        ("ls nodes/", ["1/", "2/"]),
        ("ls /nodes/1/s", ["sets/"]),
        ("cat /odd/a", [r"a\*b", r"a\ b", "axb"]),
        (r"cat /odd/a\*", [r"a\*b"]),
        (r"cat /odd/a\ ", [r"a\ b"]),
        ("ls /n*", []),
        ("ls /x/", []),
        ("pwd ", []),
    ],
)
def test_completion_offers(line: str, texts: list[str]) -> None:
    assert texts == [found.text for found in suggestions(state_in(), line)]


def test_completed_line_finds_what_was_offered() -> None:
    for found in suggestions(state_in(), "cat /odd/a"):
        line = "cat /odd/a"[: found.start_position] + found.text

        assert problems(line) == []


def test_completion_is_bounded() -> None:
    root = DictDirectory({str(number): "x" for number in range(100_000)})

    assert len(suggestions(ShellState(root), "ls /")) == SUGGESTIONS_MAX
    assert root.listed_count <= SUGGESTIONS_MAX + 1


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
def test_pattern_matches_as_expected(pattern: str, matching: list[str], other: list[str]) -> None:
    compiled = paths.compile_component(pattern)

    assert [name for name in matching if not compiled.matches(name)] == []
    assert [name for name in other if compiled.matches(name)] == []


@given(st.text())
def test_escaped_name_is_literal_and_matches_itself(name: str) -> None:
    compiled = paths.compile_component(paths.escape(name))

    assert name == compiled.literal
    assert name == paths.unescape(paths.escape(name))
    assert compiled.matches(name)


@given(st.text(alphabet="ab*?{},\\", max_size=8), st.text(alphabet="ab*", max_size=8))
def test_every_match_begins_with_the_prefix(pattern: str, name: str) -> None:
    compiled = paths.compile_component(pattern)

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
    assert words == paths.split_words(line)


def test_unclosed_quote_is_an_error() -> None:
    with pytest.raises(paths.UnclosedQuoteError):
        paths.split_words('ls "a')


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
def test_words_are_relative(here: tuple[str, ...], word: str, path: tuple[str, ...]) -> None:
    assert path == paths.absolute(here, word)


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


class DictDirectory(Directory):
    """A directory over a dict; counts the children it was asked for."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.listed_count = 0

    def children(self, prefix: str = "") -> Iterator[Child]:
        for name, content in self.content.items():
            if name.startswith(prefix):
                self.listed_count += 1
                yield Child(name, node_of(content))

    def child(self, name: str) -> Node | None:
        return node_of(self.content[name]) if name in self.content else None


def node_of(content: Any) -> Node:
    if isinstance(content, dict):
        return DictDirectory(content)
    return File(lambda: None if content is None else Document((("value", content),)))


SAMPLE: dict[str, Any] = {
    "cluster": "one",
    "empty": {},
    "nodes": {"1": {"info": "first", "sets": {"68": "a", "78": "b"}}, "2": {"info": "second"}},
    "odd": {"a*b": "star", "a b": "blank", "axb": "plain", "gone": None},
    "streams": {"3": "three", "4": "four", "12": "twelve"},
}
