"""The process that renders chat templates.

A template is an untrusted program. Jinja's sandbox keeps it from Python's internals, and this
process limits its processor time and memory.

This is a script that imports the standard library and Jinja. Its arguments are the seconds and the
bytes that a rendering may take, the most characters of its text, and the folders to import Jinja
from. A request and its answer are JSON after their length in eight bytes. A request is an object of
`template` and `variables`. An answer is a pair: "text" and the text, "refused" and the message that
the template raised, or "failed" and a reason. The process ends when its input ends,
when a rendering takes too long, or when it has no memory left.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

LENGTH_BYTES = 8


class RefusalError(Exception):
    """The exception that a template raises with `raise_exception`."""


def serve(seconds: float, characters: int) -> None:
    """Answers every request."""
    _compiled("")  # imports Jinja, which does not count as rendering
    receive, send = sys.stdin.buffer, sys.stdout.buffer
    while head := receive.read(LENGTH_BYTES):
        request = json.loads(receive.read(int.from_bytes(head, "big")))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, even within C
        answer = json.dumps(_answer(request, characters)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        send.write(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
        send.flush()


def _answer(request: dict[str, Any], characters: int) -> tuple[str, str]:
    try:
        pieces, length = [], 0
        for piece in _compiled(request["template"]).generate(request["variables"]):
            pieces.append(piece)
            length += len(piece)
            if length > characters:
                return "failed", f"its text has more than {characters} characters"
        return "text", "".join(pieces)
    except RefusalError as error:
        return "refused", str(error)
    except RecursionError:
        return "failed", "it calls itself without end, or is nested too deeply"
    except MemoryError:
        return "failed", "it needs too much memory"
    except Exception as error:  # a template can raise most of what Python can
        return "failed", f"{type(error).__name__}: {error}"


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """A template in the environment that Hugging Face's templates are written for."""
    from jinja2 import DictLoader, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}`, which marks the model's own words; it changes no text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        """Without names that reach Python's internals."""

        def __init__(*args: Any, **given: Any) -> None:  # so that `namespace(self=…)` works
            for name in dict(*args[1:], **given):
                _refuse_private(name)
            Namespace.__init__(*args, **given)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def _refuse_private(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace holds no name that begins with _, got {name!r}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols],
        loader=DictLoader({}),  # there is nothing to include
    )  # fmt: skip
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": PlainNamespace,
    }
    return environment.from_string(template)


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **given: Any) -> dict[Any, Any]:
        return dict(*args, **given)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter writes <, > and & as HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: object) -> None:
    raise RefusalError(message)


def limit(size: int) -> None:
    """Limits this process, as far as the system can; it writes no file and has no child."""
    for kind, most in (
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):
            continue  # macOS lacks some of them


if __name__ == "__main__":
    most_seconds, most_bytes, most_characters, *folders = sys.argv[1:]
    sys.path += folders
    limit(int(most_bytes))
    serve(float(most_seconds), int(most_characters))
