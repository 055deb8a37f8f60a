"""`flexsn completion bash|zsh|fish`: a script that completes commands, options and their choices, made from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from .outcome import Outcome

_USE = {
    "bash": 'eval "$(flexsn completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(flexsn completion zsh)"    # in ~/.zshrc',
    "fish": "flexsn completion fish > ~/.config/fish/completions/flexsn.fish",
}


def add_completion(commands: Any, make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    uses = "\n".join(f"  {line}" for line in _USE.values())
    parser = commands.add_parser(
        "completion", help="a script that completes `flexsn ...` in a shell", description=f"Install it with one of\n\n{uses}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("shell", choices=_USE)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=lambda args: _script(args.shell, make_parser()))


def _script(shell: str, parser: argparse.ArgumentParser) -> Outcome:
    words = dict(_words((), parser))
    text = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](words)
    return Outcome(text, {"shell": shell, "script": text})


Choices = dict[str, list[str] | None]  # word -> what may follow it (None: anything, such as a file); [] where nothing has to


def _words(path: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[tuple[tuple[str, ...], Choices]]:
    """For every command, by its words: what may be written after it."""
    found: Choices = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {name: [] for name in action.choices}
            for name, child in action.choices.items():
                yield from _words((*path, name), child)
        elif action.option_strings:
            takes = action.nargs != 0
            values = [str(c) for c in action.choices] if action.choices is not None else None
            found |= {option: values if takes else [] for option in action.option_strings}
        elif action.choices is not None:
            found |= {str(c): [] for c in action.choices}
    yield path, found


def _bash(words: dict[tuple[str, ...], Choices]) -> str:
    """One case per option that takes a value, then one per command; what has no choices is a file."""
    values, listed = [], []
    for path, choices in words.items():
        command = " ".join(path)
        for word, allowed in choices.items():
            if allowed is None or allowed:
                give = f'COMPREPLY=($(compgen -W "{" ".join(allowed)}" -- "$current"))' if allowed else "COMPREPLY=()"
                values.append(f'    "{command}:{word}") {give}; return ;;')
        listed.append(f'    "{command}") COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$current")) ;;')
    depth = max(len(path) for path in words)
    known = " | ".join(f'"{" ".join(path)}"' for path in words if path)
    return f"""# flexsn: completion for bash
_flexsn() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" path="" longer="" i
  for ((i = 1; i < COMP_CWORD && i <= {depth}; i++)); do
    longer="${{path:+$path }}${{COMP_WORDS[i]}}"
    case "$longer" in {known}) path="$longer" ;; *) break ;; esac
  done
  case "$path:$previous" in
{chr(10).join(values)}
  esac
  case "$path" in
{chr(10).join(listed)}
  esac
}}
complete -o default -F _flexsn flexsn
"""


def _zsh(words: dict[tuple[str, ...], Choices]) -> str:
    """zsh reads bash's completions."""
    return "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + _bash(words)


def _fish(words: dict[tuple[str, ...], Choices]) -> str:
    lines = ["# flexsn: completion for fish", "complete -c flexsn -n 'not __fish_seen_subcommand_from explain' -f"]
    children = {path: [p[-1] for p in words if p[:-1] == path and p] for path in words}
    for path, choices in words.items():
        seen = [f"__fish_seen_subcommand_from {name}" for name in path]
        later = [f"not __fish_seen_subcommand_from {' '.join(children[path])}"] if children[path] else []
        when = "; and ".join(seen + later) or "true"
        for word, allowed in choices.items():
            what = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" if word.startswith("-") else f"-a {word}"
            takes = "" if allowed == [] else f" -x -a '{' '.join(allowed)}'" if allowed else " -r -F"
            lines.append(f"complete -c flexsn -n '{when}' {what}{takes}")
    return "\n".join(lines) + "\n"
