"""The parser of the command line: a mistyped verb or flag is answered with the nearest ones."""

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Names the nearest word of its own; a wrong flag of a verb prints the usage of that verb."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A verb refuses unknown arguments itself: argparse would show the usage of the whole program."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown and " " in self.prog:
            self._refuse(unknown)
        return parsed, unknown

    def _refuse(self, unknown: Iterable[str]) -> NoReturn:
        flags = [flag for action in self._actions for flag in action.option_strings]
        from pipeline.settings.values import nearest  # a command line that is right does without it

        meant = [
            flag
            for word in unknown
            if word.startswith("-")
            for flag in nearest(word.partition("=")[0], flags, limit=1)
        ]
        self.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(meant)}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """An empty text is no value: a shell variable without one would name the current folder."""
        if (
            not arg_string
            and action.default != ""
            and action.nargs not in (argparse.PARSER, argparse.REMAINDER)
        ):
            raise argparse.ArgumentError(action, "'' is empty; give a value, or leave it out")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = None if action.choices is None else [str(choice) for choice in action.choices]
        if choices is None or value in action.choices:  # type: ignore[operator] # an iterable with `in`
            return
        from pipeline.settings.values import nearest

        found = nearest(str(value), choices, limit=3)
        remedy = _meant(found) if found else f"; choose from {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"{str(value)!r} is not known{remedy}")


def _meant(found: list[str]) -> str:
    return f"; did you mean {' or '.join(found)}?" if found else ""
