"""Which pass has made a program wrong: plan again, and compare the program behind each pass.

Up to `localize` a program has global shapes, so one device evaluates it. Then the devices do.
"""

from __future__ import annotations

from ...compiler.plan import Plan
from ...errors import ShardingError
from ...fx_passes.pass_runner import observing
from ...fx_passes.program import Program
from ...fx_passes.stages import LOCAL
from .certificate import TRIALS
from .trial import NoNumbers, Trial


class _Wrong(Exception):
    """The program behind a pass is wrong: planning need not go on."""

    def __init__(self, name: str, error: ShardingError) -> None:
        self.name, self.error = name, error


def blamed(plan: Plan, error: ShardingError) -> ShardingError:
    """Add to a plan's error the pass that made it wrong, if planning again shows it.

    A plan from a file has no passes: its error stays as it is.
    """
    if plan._replanner is None:
        return error
    try:
        # Compared as soon as a pass has run: the first wrong one ends planning.
        with observing(_compare):
            plan._replanner()(plan.captured)
    except _Wrong as wrong:
        first = wrong.error
        made = f"pass {wrong.name} made it so: the program before it is right"
        return ShardingError(
            first.what, where=first.where, why=f"{made}; {first.why}", fix=first.fix
        )
    return error


def _compare(name: str, program: Program) -> None:
    """Raise _Wrong if a program, as a pass has left it, computes other values than one device."""
    is_local = program.stage >= LOCAL
    graph = program.sharded if is_local else program.graph
    plan = Plan(program.mesh, program.captured, graph, program.graph, None, {})
    for seed, positive in TRIALS:
        for wide in (True, False):
            try:
                trial = Trial(plan, seed, positive, wide)
                if is_local:
                    trial.run(program.graph)
            except NoNumbers:
                continue
            except ShardingError as error:
                raise _Wrong(name, error) from error
            break
