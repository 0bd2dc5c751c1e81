"""The line and the module of a program at which torch raised an error.

before   RuntimeError: shape '[5, 5]' is invalid for input of size 12
after    RuntimeError: shape '[5, 5]' is invalid for input of size 12
           where model.py:7: return self.head(x.view(5, 5))
           in    blocks.0.head, a Head
"""

from __future__ import annotations

import traceback

from ..errors import innermost_frame_of, user_line_of
from .branching_modules import modules_in, name_of_innermost

_KINDS = RuntimeError, ValueError, IndexError, TypeError


def name_line(error: Exception) -> None:
    """Append the user's line to the text of an error of torch, raised while capturing.

    Its type stays. An error that the user's own code raises stays as it is: its traceback ends
    there.
    """
    text = error.args[0] if len(error.args) == 1 else None
    if type(error) not in _KINDS or not isinstance(text, str) or _is_raised_by_user(error):
        return
    lines = [text]
    if (where := user_line_of(error)) is not None:
        frame = traceback.extract_tb(innermost_frame_of(error), limit=1)[0]
        lines.append(f"  where {where}: {frame.line}")
    if name := name_of_innermost(error.__traceback__):
        *_, module = modules_in(error.__traceback__)
        leaf = not any(module.children())
        lines.append(f"  in    {name}, {module if leaf else 'a ' + type(module).__name__}")
    error.args = ("\n".join(lines),)


def _is_raised_by_user(error: Exception) -> bool:
    """Return whether the innermost frame of an error's traceback is the user's."""
    innermost = innermost_frame_of(error)
    return innermost is not None and innermost.tb_next is None
