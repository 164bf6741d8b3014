"""Interactive prompt of the shell: line input, completion, and recovery from failures.

Ctrl-C aborts the line or the command. Ctrl-D and `exit` leave the shell. A failing backend ends one
command, not the shell. The Tab key completes commands in the first word and paths where a command
accepts them, from a bounded number of names. It stays silent on failures.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document as Line

from streammeta.shell import commands, paths, tree
from streammeta.shell.events import Event, Left, Moved, Problem, Text, text_lines
from streammeta.shell.state import MetadataSource, ShellState

SUGGESTIONS_MAX = 200

_LAST_WORD = re.compile(r"(?:\\.|[^\s\\])*\\?$", re.DOTALL)
_PATH_COMMANDS = frozenset({"ls", "cd", "cat", "tree", "find"})


def suggestions(state: ShellState, line: str) -> list[Completion]:
    """Return completions of the end of `line`."""
    # The last word ends at the cursor. An escaped blank belongs to it.
    match = _LAST_WORD.search(line)
    word = match[0] if match else ""
    # Only the first word counts here, and command names are never quoted.
    before = line[: len(line) - len(word)].split()
    if not before:
        return _commands(word)
    if before[0] == "help" and len(before) == 1:
        return _commands(word)
    if before[0] not in _PATH_COMMANDS:
        return []
    try:
        return _paths(state, word)
    except Exception:  # noqa: BLE001 - a failure offers nothing
        return []


def _commands(word: str) -> list[Completion]:
    return [Completion(name, -len(word)) for name in commands.COMMANDS if name.startswith(word)]


def _paths(state: ShellState, word: str) -> list[Completion]:
    parent, slash, start = word.rpartition("/")
    prefix = paths.compile_component(start).literal
    if prefix is None:
        return []  # a pattern needs no completion
    place = paths.absolute(state.here, parent + slash)

    # Completion can't continue several paths, so the first directory is enough.
    for _, node in paths.resolve(state.root, place):
        if isinstance(node, tree.File):
            continue
        return [
            Completion(
                # With the slash, the next Tab continues below the directory.
                paths.escape(child.name) + ("" if isinstance(child.node, tree.File) else "/"),
                -len(start),
                display=child.name,
            )
            for child in node.suggest(prefix, SUGGESTIONS_MAX)
        ]

    return []


Write = Callable[[str], None]
Show = Callable[[Iterable[str]], None]


Explain = Callable[[Exception], tuple[str, str]]


def explain_plainly(error: Exception) -> tuple[str, str]:
    """Return the message of an error, and its hint if it has one."""
    return str(error) or type(error).__name__, getattr(error, "hint", "")


class Prompt:
    """Prompt of one user on a tree. `write` prints one line of output, given without its end.

    `show` prints all lines of a command as they arrive, by default one by one with `write`.
    `explain` returns the message and the next step of a failure.
    """

    def __init__(
        self,
        root: tree.Directory,
        write: Write,
        *,
        source: MetadataSource | None = None,
        show: Show | None = None,
        explain: Explain = explain_plainly,
    ) -> None:
        self.state = ShellState(root, source=source)
        self._explain = explain
        self.has_left = False
        self._write = write
        self._show = show or self._write_all

    def run_line(self, line: str) -> None:
        """Run a typed line and add it to the history."""
        if not line.strip():
            return

        # Recorded before it runs, so that failed lines are in the history too.
        self.state = replace(self.state, history=(*self.state.history, line.strip()))
        try:
            words = paths.split_words(line)
            # The terminal may have been resized since the last line.
            width = shutil.get_terminal_size().columns
            command = commands.COMMANDS.get(words[0])
            show = self._write_all if command is not None and command.goes_on else self._show
            show(text_lines(self._follow(commands.execute(self.state, words)), width))
        except paths.UnclosedQuoteError as error:
            self._write(f"{error}: close it or write \\ before it")
        except Exception as error:  # noqa: BLE001 - a failure costs a command, never the session
            message, hint = self._explain(error)
            self._write(message + (f"\n  {hint}" if hint else ""))

    def _write_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._write(line)

    def _follow(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events, after applying the changes of the prompt's state."""
        for event in events:
            match event:
                # The prompt continues after a problem, so it becomes text.
                case Problem(_, message, hint):
                    yield Text(message + (f"\n  {hint}" if hint else ""))
                case Moved(path):
                    self.state = replace(self.state, here=path)
                case Left():
                    self.has_left = True
            yield event


class _TreeCompleter(Completer):
    def __init__(self, session: Prompt) -> None:
        self._session = session

    def get_completions(self, document: Line, _event: CompleteEvent) -> Iterator[Completion]:
        yield from suggestions(self._session.state, document.text_before_cursor)


def run_interactive(
    root: tree.Directory,
    banner: str,
    write: Write = print,
    *,
    source: MetadataSource | None = None,
    show: Show | None = None,
    explain: Explain = explain_plainly,
) -> None:
    """Run the prompt until the user leaves; see `Prompt`."""
    session = Prompt(root, write, source=source, show=show, explain=explain)
    prompt: PromptSession[str] = PromptSession(
        completer=_TreeCompleter(session),
        # Completion sends requests, so only the Tab key starts it, in a thread.
        complete_while_typing=False,
        complete_in_thread=True,
    )
    write(banner)

    while not session.has_left:
        try:
            # A failure of something else on the prompt's event loop belongs into the log; the
            # library would stop and ask for Enter.
            where = f"{tree.path_text(session.state.here)}> "
            session.run_line(prompt.prompt(where, set_exception_handler=False))
        except KeyboardInterrupt:
            write("^C")
        except EOFError:
            return
