"""The prompt: reads lines, runs them, shows what comes of it, until the user leaves.

Ctrl-C abandons the line or the command and goes on; Ctrl-D and `exit` leave. A failing backend
costs one command, never the session.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document as Line

from streammeta.controller.errors import ApiError
from streammeta.shell.commands import ShellState, execute
from streammeta.shell.completion import suggestions
from streammeta.shell.events import Event, Left, Moved, Problem
from streammeta.shell.paths import UnclosedQuoteError, split_words
from streammeta.shell.render import text_lines
from streammeta.shell.tree import Directory, path_text

Write = Callable[[str], None]


class Session:
    """One user's walk through a tree. `write` takes one line of output without its end."""

    def __init__(self, root: Directory, write: Write) -> None:
        self.state = ShellState(root)
        self.has_left = False
        self._write = write

    def run_line(self, line: str) -> None:
        """Run what was typed and remember it."""
        if not line.strip():
            return
        self.state = replace(self.state, history=(*self.state.history, line.strip()))
        try:
            words = split_words(line)
            width = shutil.get_terminal_size().columns
            for text in text_lines(self._followed(execute(self.state, words)), width):
                self._write(text)
        except UnclosedQuoteError as error:
            self._write(f"{error}: close it or write \\ before it")
        except ApiError as error:
            hint = getattr(error, "hint", "")
            self._write(f"{error}" + (f"\n  {hint}" if hint else ""))

    def _followed(self, events: Iterable[Event]) -> Iterator[Event]:
        """Pass the events on, having done what they ask of the session."""
        for event in events:
            match event:
                case Problem(_, message, hint):
                    self._write(message + (f"\n  {hint}" if hint else ""))
                case Moved(path):
                    self.state = replace(self.state, here=path)
                case Left():
                    self.has_left = True
            yield event


class _TreeCompleter(Completer):
    def __init__(self, session: Session) -> None:
        self._session = session

    def get_completions(self, document: Line, _event: CompleteEvent) -> Iterator[Completion]:
        for found in suggestions(self._session.state, document.text_before_cursor):
            yield Completion(found.text, -found.replaced_length, display=found.label)


def run_interactive(root: Directory, banner: str, write: Write = print) -> None:
    """Talk to the user until they leave."""
    session = Session(root, write)
    prompt: PromptSession[str] = PromptSession(
        completer=_TreeCompleter(session),
        complete_while_typing=False,
        complete_in_thread=True,
    )
    write(banner)
    while not session.has_left:
        try:
            # A failure of something else on the prompt's event loop belongs into the log; the
            # library would stop and ask for Enter.
            where = f"{path_text(session.state.here)}> "
            session.run_line(prompt.prompt(where, set_exception_handler=False))
        except KeyboardInterrupt:
            write("^C")
        except EOFError:
            return
