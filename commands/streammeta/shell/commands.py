"""Commands of the shell: generators from (state, words) to events.

They print nothing and keep no state: the caller shows the events and keeps the state that `Moved`
describes. A failure of the backend is raised as `ApiError`.
"""

from collections.abc import Callable, Iterator
from difflib import get_close_matches

from streammeta.shell import events, metadata_commands, paths, tree
from streammeta.shell.state import Command, Run, ShellState

_SUMMARY_FILE = "info"
_TAG_OPTION = "--tag"


def execute(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    """Run one command line that is already split. No words yield no events."""
    if not words:
        return
    name, *arguments = words
    command = COMMANDS.get(name)
    if command is None:
        yield _unknown_command(name)
        return
    if not command.takes(len(arguments)):
        yield events.usage_problem(
            f"{name}: got {len(arguments)} arguments, expected {command.wanted}",
            f"usage: {command.usage}",
        )
        return

    yield from command.run(state, arguments)


def _ls(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    # Directories are listed after all files, each with a heading.
    directories: list[tuple[tree.Path, tree.Directory]] = []
    file_count = 0

    for found in _targets("ls", state, words or ["."]):
        if isinstance(found, events.Problem):
            yield found
            continue
        path, node = found
        if isinstance(node, tree.File):
            file_count += 1
            yield events.Listed(path, tree.path_text(path), is_directory=False, in_columns=True)
        else:
            directories.append((path, node))

    # A single directory needs no heading, as with the system's own ls.
    needs_heading = file_count + len(directories) > 1
    for position, (path, directory) in enumerate(directories):
        if needs_heading:
            yield from [events.Caption("")] if position or file_count else []
            yield events.Caption(f"{tree.path_text(path)}:")
        for child in directory.children():
            is_directory = not isinstance(child.node, tree.File)
            label = f"{child.name}/" if is_directory else child.name
            yield events.Listed((*path, child.name), label, is_directory, in_columns=True)


def _cat(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    shown = 0
    for found in _targets("cat", state, words):
        if isinstance(found, events.Problem):
            yield found
            continue
        path, node = found
        file = _file_to_show(node)

        if file is None:
            yield events.Problem(
                events.ProblemCode.IS_DIRECTORY,
                f"cat: {tree.path_text(path)}: is a directory",
                f"list it with `ls {tree.path_text(path)}` or show all of it with `tree`",
            )
            continue

        document = file.read()
        # The file may have been deleted since it was listed.
        if document is None:
            yield _not_found("cat", tree.path_text(path))
            continue
        # With a pattern or several words, captions tell the files apart.
        if shown or len(words) > 1 or not _names(state, words[0], path):
            yield from [events.Caption("")] if shown else []
            yield events.Caption(f"{tree.path_text(path)}:")
        shown += 1
        yield events.Content(path, document)


def _names(state: ShellState, word: str, path: tree.Path) -> bool:
    """Return whether the user typed this exact path, so that it need not be repeated."""
    return path == tuple(map(paths.unescape, paths.absolute(state.here, word)))


def _file_to_show(node: tree.Node) -> tree.File | None:
    """Return the file itself, or the `info` of a directory that has one."""
    if isinstance(node, tree.File):
        return node
    summary = node.child(_SUMMARY_FILE)
    return summary if isinstance(summary, tree.File) else None


def _walk(name: str, visit: Callable[[tree.Path, tree.Node], Iterator[events.Event]]) -> Run:
    """Return a command that visits the nodes that its words match, by default the directory."""

    def run(state: ShellState, words: list[str]) -> Iterator[events.Event]:
        for found in _targets(name, state, words or ["."]):
            if isinstance(found, events.Problem):
                yield found
            else:
                yield from visit(*found)

    return run


def _subtree(path: tree.Path, node: tree.Node, depth: int = 0) -> Iterator[events.Event]:
    """Yield the node and all nodes below it. Nodes deleted since the listing are omitted."""
    label = path[-1] if depth else tree.path_text(path)
    if isinstance(node, tree.File):
        document = node.read()
        if document is not None:
            yield events.Caption(f"{label}:", depth)
            yield events.Content(path, document, depth + 1)
        return
    yield events.Caption(f"{label}:", depth)
    for child in node.children():
        yield from _subtree((*path, child.name), child.node, depth + 1)


def _everything_in(path: tree.Path, node: tree.Node) -> Iterator[events.Event]:
    is_directory = not isinstance(node, tree.File)
    yield events.Listed(path, tree.path_text(path), is_directory, in_columns=False)
    if not isinstance(node, tree.File):
        for child in node.children():
            yield from _everything_in((*path, child.name), child.node)


def _find(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    if not any(word.startswith(_TAG_OPTION) for word in words):
        yield from _walk("find", _everything_in)(state, words)
        return

    tags = _tags_in(words)
    streams = state.root.child("streams")
    if tags is None or not isinstance(streams, tree.TaggedDirectory):
        yield events.usage_problem(
            f"find: can't find {' '.join(words)}",
            "try `find --tag KEY=VALUE`, with each key once and without a path",
        )
        return

    for child in streams.find_tagged(tags):
        path = ("streams", child.name)
        yield events.Listed(path, tree.path_text(path), is_directory=False, in_columns=False)


def _tags_in(words: list[str]) -> dict[str, str] | None:
    """Return the tags of `--tag KEY=VALUE` or `--tag=KEY=VALUE`, None if there are other words."""
    tags: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        option, joined, text = word.partition("=")
        if option != _TAG_OPTION:
            return None
        key, separator, value = (text if joined else next(rest, "")).partition("=")
        if not separator or key in tags:
            return None
        tags[key] = value
    return tags


def _cd(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    word = words[0] if words else "/"
    matches = []

    # Stop at the second match, because a pattern may match millions.
    for match in paths.resolve(state.root, paths.absolute(state.here, word)):
        matches.append(match)
        if len(matches) > 1:
            yield events.usage_problem(
                f"cd: {word}: matches {tree.path_text(matches[0][0])} and"
                f" {tree.path_text(match[0])}",
                "name one directory",
            )
            return

    if not matches:
        yield _not_found("cd", word)
    elif isinstance(matches[0][1], tree.File):
        problem = f"cd: {tree.path_text(matches[0][0])}: not a directory"
        yield events.Problem(events.ProblemCode.NOT_DIRECTORY, problem, "show the file with `cat`")
    else:
        yield events.Moved(matches[0][0])


def _pwd(state: ShellState, _words: list[str]) -> Iterator[events.Event]:
    yield events.Text(tree.path_text(state.here))


def _history(state: ShellState, words: list[str]) -> Iterator[events.Event]:
    if words and not (words[0].isascii() and words[0].isdigit()):
        yield events.usage_problem(f"history: {words[0]} is not a count", "try `history 10`")
        return
    # Numbered from the first line of the prompt, however many are shown.
    lines = list(enumerate(state.history, start=1))
    count = int(words[0]) if words else len(lines)
    for number, line in lines[max(0, len(lines) - count) :]:
        yield events.Text(f"{number:5}  {line}")


def _help(_state: ShellState, words: list[str]) -> Iterator[events.Event]:
    if not words:
        width = max(len(command.usage) for command in COMMANDS.values())
        for command in COMMANDS.values():
            yield events.Text(f"{command.usage:{width}}  {command.summary}")
        yield events.Text("")
        yield events.Text(
            "In paths ? is any character, * any run of them, {a,b} either. \\ quotes the next"
        )
        yield events.Text("character. In names %2F stands for a slash.")
    elif words[0] in COMMANDS:
        command = COMMANDS[words[0]]
        yield events.Text(f"{words[0]}: {command.summary}")
        yield events.Text("")
        yield events.Text(f"usage: {command.usage}")
    else:
        yield _unknown_command(words[0])


def _exit(_state: ShellState, _words: list[str]) -> Iterator[events.Event]:
    yield events.Left()


COMMANDS: dict[str, Command] = {
    "ls": Command("ls [PATH]...", "list directories", _ls, 0, None),
    "cd": Command("cd [PATH]", "go to a directory, to / without one", _cd, 0, 1),
    "pwd": Command("pwd", "print the current directory", _pwd, 0, 0),
    "cat": Command("cat PATH...", "show the content of files", _cat, 1, None),
    "tree": Command(
        "tree [PATH]...", "show all files below directories", _walk("tree", _subtree), 0, None
    ),
    "find": Command(
        "find [PATH]... | --tag KEY=VALUE...",
        "print every path below directories, or the streams with all of the tags",
        _find,
        0,
        None,
    ),
    **metadata_commands.MAP_COMMANDS,
    "history": Command("history [COUNT]", "print the last lines typed", _history, 0, 1),
    "help": Command("help [COMMAND]", "explain the commands, or one of them", _help, 0, 1),
    "exit": Command("exit", "leave the shell", _exit, 0, 0),
}


def _targets(
    command: str, state: ShellState, words: list[str]
) -> Iterator[tuple[tree.Path, tree.Node] | events.Problem]:
    """Yield the matches of each word, or a problem for a word without matches."""
    for word in words:
        # Matches arrive lazily, so a word without any is known only at the end.
        is_found = False
        for found in paths.resolve(state.root, paths.absolute(state.here, word)):
            is_found = True
            yield found
        if not is_found:
            yield _not_found(command, word)


def _not_found(command: str, word: str) -> events.Problem:
    parent = tree.path_text(paths.absolute((), word)[:-1]) if word.startswith("/") else "."
    return events.Problem(
        events.ProblemCode.NOT_FOUND,
        f"{command}: {word}: no such file or directory",
        f"list the directory with `ls {parent}`",
    )


def _unknown_command(name: str) -> events.Problem:
    close = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean `{close[0]}`?" if close else "`help` lists the commands"
    return events.usage_problem(f"{name}: unknown command", hint)
